"""From a module and sample inputs to a program, by torch.export in its training IR.

Sizes of row spaces are symbols of the export, so that the program fits any graph. Value-dependent Python branches are
decided by draft_export on the sample, where plain export refuses them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.sparse import patched_sparse
from sylvie_fx.ir.errors import CaptureError, SylvieError
from sylvie_fx.ir.placement import NODES, Rows
from sylvie_fx.ir.program import Input, Program, meta, user_line
from sylvie_fx.ir.rules import expression

log = logging.getLogger(__name__)

Rebuild: TypeAlias = Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
Call: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def plain_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``model(*args, **kwargs)``."""
    return model(*args, **kwargs)


@dataclass(frozen=True)
class Captured:
    """A captured forward pass.

    Attributes:
        program: The program, whose output is the flat list of the result's tensors.
        constants: Leaves of the result: constants as they are, None in the place of each tensor.
        tensor_leaves: Which leaves are tensors.
        tree: Structure of the result.
    """

    program: Program
    constants: tuple[Any, ...]
    tensor_leaves: tuple[bool, ...]
    tree: pytree.TreeSpec


class _Wrapper(nn.Module):
    """Gives the model the call that its user makes, from flat tensors."""

    def __init__(self, model: nn.Module, rebuild: Rebuild, call: Call, record: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self._rebuild, self._call = rebuild, call
        # A callable, since torch.export undoes what forward assigns to attributes and containers of the module.
        self._record = record

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        args, kwargs = self._rebuild(tensors)
        with patched_sparse():
            leaves, tree = pytree.tree_flatten(self._call(self.model, args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, int, float, str, bool, type(None))):
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}",
                    remedy="return tensors, or lists, tuples and dicts of tensors",
                )
        self._record((tuple(None if isinstance(v, Tensor) else v for v in leaves), tuple(isinstance(v, Tensor) for v in leaves), tree))
        return [v for v in leaves if isinstance(v, Tensor)]


def capture(model: nn.Module, inputs: Sequence[Input], samples: Sequence[Tensor], rebuild: Rebuild, call: Call = plain_call) -> Captured:
    """Capture one forward pass in the model's present mode.

    Args:
        model: The unmodified module; its ``training`` flags decide what is captured.
        inputs: What each tensor is; the row spaces become symbols.
        samples: One small tensor for each input; every space has one size throughout.
        rebuild: Makes the arguments of the call from the flat tensors (stand-ins for graphs included).
        call: How the model is called with them.

    Raises:
        CaptureError: The forward pass can not be captured; names the user's line and the reason.
    """
    results: list[tuple[tuple[Any, ...], tuple[bool, ...], pytree.TreeSpec]] = []
    wrapper = _Wrapper(model, rebuild, call, results.append)
    wrapper.training = model.training
    dims: dict[str, Any] = {}
    specs = []
    for item in inputs:
        if isinstance(item.rows, Rows):
            dim = dims.setdefault(item.rows.space, torch.export.Dim(_symbol(item.rows.space, len(dims)), min=2, max=_MOST.get(item.rows.space, 2**40)))
            specs.append({item.rows.dim: dim})
        else:
            specs.append(None)
    exported = _export(wrapper, list(samples), specs)
    module = exported.module(check_guards=False)
    _strip(module)
    _name_inputs(module, inputs)
    sizes = {}
    for node, item in zip(placeholders(module.graph), inputs, strict=True):
        if isinstance(item.rows, Rows):
            size = expression(node.meta["val"].shape[item.rows.dim])
            if not size.free_symbols:
                raise CaptureError(
                    f"the number of rows of {item.path} became a constant ({size}) in the captured program",
                    why="the model compares it with a fixed number or mixes it with a tensor of fixed length",
                    remedy="make sizes that belong to the graph depend on the graph that is passed in",
                )
            sizes.setdefault(item.rows.space, size)
    program = Program(module, list(inputs), sizes, "train" if model.training else "eval")
    for node in program.graph.nodes:
        meta(node)
    return Captured(program, *results[-1])


_MOST = {NODES: 2**31}
# Bounded, so that models that check sizes against the range of an index are captured.


def _symbol(space: str, index: int) -> str:
    return {"N": "nodes", "E": "edges"}.get(space, f"rows{index}")


def _export(wrapper: _Wrapper, samples: list[Tensor], specs: list[Any]) -> Any:
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_quiet())
            return torch.export.export(wrapper, (samples,), dynamic_shapes=(specs,), strict=False)
    except SylvieError:
        raise
    except Exception as error:
        own = _own_error(error)
        if own is not None:
            raise own from error
        raise explain_failure(error) from error


def _own_error(error: BaseException | None) -> SylvieError | None:
    while error is not None:
        if isinstance(error, SylvieError):
            return error
        error = error.__cause__ or error.__context__
    return None


def explain_failure(error: Exception) -> CaptureError:
    """What stopped torch.export, as a sentence with the user's line."""
    import traceback

    frames = "".join(traceback.format_tb(error.__traceback__))
    text = str(error).strip().splitlines() or [type(error).__name__]
    kind = type(error).__name__
    what = f"the forward pass can not be captured: {kind}: {text[0][:300]}"
    data_dependent = "data-dependent" in str(error) or "DataDependent" in kind or "GuardOnDataDependent" in kind
    return CaptureError(
        what,
        where=user_line(frames) or None,
        why="a Python branch or number depends on values that are known only when the program runs" if data_dependent else None,
        remedy="express the branch with tensor operations (torch.where), or move it out of forward" if data_dependent else None,
    )


@contextlib.contextmanager
def _quiet() -> Any:
    """torch.export logs what we report ourselves."""
    names = ["torch.export", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._export", "torch.fx"]
    loggers = [logging.getLogger(n) for n in names]
    levels = [x.level for x in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of a graph in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


_CHECKS = frozenset({
    torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default,
    torch.ops.aten.sym_constrain_range.default, torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten._assert_tensor_metadata.default,
})  # fmt: skip


def _strip(module: fx.GraphModule) -> None:
    """Drop guards and the sizes' assertions: sizes of masks differ between ranks, and kinds are checked by the api."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target in _CHECKS:
            node.replace_all_uses_with(None)  # type: ignore[arg-type]
            graph.erase_node(node)
    output = next(n for n in graph.nodes if n.op == "output")
    (value,) = output.args
    if isinstance(value, fx.Node):  # the pytree call of the exported signature
        value = value.args[0]
    output.args = (list(value),)
    graph.set_codegen(fx.graph.CodeGen())
    _erase_unused(graph)
    module.recompile()


def _erase_unused(graph: fx.Graph) -> None:
    mutating = {n for n in graph.nodes if n.op == "call_function" and _mutates(n)}
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in mutating:
            graph.erase_node(node)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target._schema.is_mutable or node.target is torch.ops.aten.batch_norm.default
    )


def _name_inputs(module: fx.GraphModule, inputs: Sequence[Input]) -> None:
    for node, item in zip(placeholders(module.graph), inputs, strict=True):
        node.name = item.name
        node.target = item.name
