"""From a module and sample inputs to a program, by torch.export in its training IR.

Sizes of row spaces are symbols of the export, so that the program fits any graph. Where plain export refuses Python
branches on values, they are decided by an eager run (capture/decisions.py).
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.cleaning import clean, placeholders
from sylvie_fx.capture.decisions import Decision, Replaying, record
from sylvie_fx.capture.sparse import patched_sparse
from sylvie_fx.capture.spellings import Spellings
from sylvie_fx.ir.errors import BranchError, CaptureError, SylvieError
from sylvie_fx.ir.placement import NODES, Rows
from sylvie_fx.ir.program import Input, Program, meta
from sylvie_fx.ir.rules import expression
from sylvie_fx.ir.source import is_ours, user_line

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
        decided: Python branches were decided on the samples; the program checks on the real graph that they hold.
        least: Rows that every space must have for the program to be valid.
    """

    program: Program
    constants: tuple[Any, ...]
    tensor_leaves: tuple[bool, ...]
    tree: pytree.TreeSpec
    decided: bool = False
    least: int = 2


class _Wrapper(nn.Module):
    """Gives the model the call that its user makes, from flat tensors."""

    def __init__(self, model: nn.Module, rebuild: Rebuild, call: Call, record: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self._rebuild, self._call = rebuild, call
        # A callable, since torch.export undoes what forward assigns to attributes and containers of the module.
        self._record = record
        self.decisions: list[Decision] | None = None
        environments: list[Any] = []
        self._note = environments.append
        self.environments: Callable[[], list[Any]] = lambda: environments

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        every: list[Any] = [s for t in tensors for s in t.shape]
        for size in (s for s in every if isinstance(s, torch.SymInt)):
            self._note(size.node.shape_env)
            break
        args, kwargs = self._rebuild(tensors)
        replaying = contextlib.nullcontext() if self.decisions is None else Replaying(self.decisions)
        with torch.fx.traceback.preserve_node_meta(), Spellings(), patched_sparse(), replaying:
            leaves, tree = pytree.tree_flatten(self._call(self.model, args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, int, float, str, bool, type(None))):
                raise CaptureError(
                    f"the model returns a {type(leaf).__name__}",
                    remedy="return tensors, or lists, tuples and dicts of tensors",
                )
        self._record(
            (
                tuple(None if isinstance(v, Tensor) else v for v in leaves),
                tuple(isinstance(v, Tensor) for v in leaves),
                tree,
            )
        )
        return [v for v in leaves if isinstance(v, Tensor)]


def capture(model: nn.Module, inputs: Sequence[Input], samples: Sequence[Tensor], rebuild: Rebuild, call: Call = plain_call,
            decide: bool = False) -> Captured:  # fmt: skip
    """Capture one forward pass in the model's present mode.

    Args:
        model: The unmodified module; its ``training`` flags decide what is captured.
        inputs: What each tensor is; the row spaces become symbols.
        samples: One small tensor for each input; every space has one size throughout.
        rebuild: Makes the arguments of the call from the flat tensors (stand-ins for graphs included).
        call: How the model is called with them.
        decide: Decide Python branches on the samples at once, without trying to do without.

    Raises:
        CaptureError: The forward pass can not be captured; names the user's line and the reason.
    """
    results: list[tuple[tuple[Any, ...], tuple[bool, ...], pytree.TreeSpec]] = []
    wrapper = _Wrapper(model, rebuild, call, results.append)
    wrapper.training = model.training
    if decide:
        wrapper.decisions = _decide(wrapper, samples)
    least = 2
    try:
        exported = _export(wrapper, list(samples), _dynamic(inputs, least))
    except _TooFewRows:
        least = _ENOUGH
        exported = _export(wrapper, list(samples), _dynamic(inputs, least), last=True)
    module = exported.module(check_guards=False)
    clean(module, decided=wrapper.decisions is not None)
    _name_inputs(module, inputs)
    sizes: dict[str, Any] = {}
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
    return Captured(program, *results[-1], decided=wrapper.decisions is not None, least=least)


class _TooFewRows(Exception):
    """The forward pass is the same for all sizes only above a number of rows (``x[1:]`` and ``x[:-1]`` meet, say)."""


_ENOUGH = 32
_MOST = {NODES: 2**31}
# Bounded, so that models that check sizes against the range of an index are captured.


def _dynamic(inputs: Sequence[Input], least: int) -> list[Any]:
    """The dynamic dimension of each input that has rows."""
    dims: dict[str, Any] = {}
    specs: list[Any] = []
    for item in inputs:
        if isinstance(item.rows, Rows):
            space = item.rows.space
            if space not in dims:
                dims[space] = torch.export.Dim(_symbol(space, len(dims)), min=least, max=_MOST.get(space, 2**40))
            specs.append({item.rows.dim: dims[space]})
        else:
            specs.append(None)
    return specs


def _symbol(space: str, index: int) -> str:
    return {"N": "nodes", "E": "edges"}.get(space, f"rows{index}")


def _decide(wrapper: _Wrapper, samples: Sequence[Tensor]) -> list[Decision]:
    return record(wrapper.model, lambda: wrapper([t.detach() for t in samples]))


def _export(wrapper: _Wrapper, samples: list[Tensor], specs: list[Any], *, last: bool = False) -> Any:
    try:
        with _quiet():
            return torch.export.export(wrapper, (samples,), dynamic_shapes=(specs,), strict=False)
    except SylvieError:
        raise
    except Exception as error:
        own = _own_error(error)
        if own is not None:
            raise own from error
        if not last and "in the specified range" in str(error):
            raise _TooFewRows from error
        if _data_dependent(error) and wrapper.decisions is None:
            failure = error
        else:
            raise explain_failure(error, wrapper.environments()) from error
    try:
        wrapper.decisions = _decide(wrapper, samples)
    except SylvieError:
        raise
    except Exception as error:
        # The sample may lack what the model needs (sorted edges, say): the caller may try the whole graph instead.
        raise BranchError(
            f"the forward pass raises {type(error).__name__}: {_first_line(error)}", where=_line_of(error),
            why="it branches on the graph, and was run on a sample of it to decide the branches",
        ) from failure  # fmt: skip
    return _export(wrapper, samples, specs, last=last)


def _data_dependent(error: Exception) -> bool:
    return "data-dependent" in str(error) or "DataDependent" in type(error).__name__


def _own_error(error: BaseException | None) -> SylvieError | None:
    while error is not None:
        if isinstance(error, SylvieError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _line_of(error: Exception) -> str | None:
    return user_line("".join(traceback.format_tb(error.__traceback__))) or None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def explain_failure(error: Exception, environments: Sequence[Any] = ()) -> CaptureError:
    """What stopped torch.export, as a sentence with the user's line.

    Args:
        error: What it raised.
        environments: Shape environments of the capture, which know where a size became a number.
    """
    what = f"the forward pass can not be captured: {type(error).__name__}: {_first_line(error)}"
    where = _line_of(error)
    if _data_dependent(error):
        return CaptureError(
            what, where=where, why="a Python branch or number depends on values that are known only when the program runs",
            remedy="express the branch with tensor operations (torch.where), or move it out of forward",
        )  # fmt: skip
    if "Constraints violated" in str(error):
        name = re.search(r"Constraints violated \((\w+)", str(error))
        return CaptureError(
            f"the forward pass is not the same for every number of {name[1] if name else 'rows'}", where=_where_fixed(environments),
            why="it compares the number with another, loops over it, turns it into a Python number, or fits it into a fixed shape",
            remedy="compute with sizes as with any number, and use tensor operations over all rows",
        )  # fmt: skip
    if re.search(r"SymInt|\b[su]\d+\b", str(error)):
        return CaptureError(
            what, where=where, why="sizes of the graph are symbols while the model is captured, so that the program fits any graph",
            remedy="compute with sizes as with any number, and let no shape fit one graph only",
        )  # fmt: skip
    return CaptureError(what, where=where)


def _where_fixed(environments: Sequence[Any]) -> str | None:
    """The line where a size of the graph was replaced by a number."""
    for sizes in environments[-1:]:
        for symbol, place in sizes.replacements_slocs.items():
            frame = place.framework_loc
            fixed = symbol in sizes.backed_var_to_val and sizes.replacements[symbol].is_number
            if fixed and isinstance(frame, traceback.FrameSummary) and not is_ours(frame.filename):
                return f"{frame.filename}:{frame.lineno}"
    return None


@contextlib.contextmanager
def _quiet() -> Any:
    """torch.export logs, warns and prints what we report ourselves, or what does not matter here."""
    names = ["torch.export", "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "torch._export", "torch.fx"]
    loggers = [logging.getLogger(n) for n in names]
    levels = [x.level for x in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    printed = io.StringIO()  # of a failing capture torch prints the partial graph
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(printed):
            warnings.filterwarnings("ignore", message=".*(was|were) assigned during export")
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _name_inputs(module: fx.GraphModule, inputs: Sequence[Input]) -> None:
    names = {item.name for item in inputs}
    for node in module.graph.nodes:
        if node.name in names:
            node._rename(f"{node.name}_value")
    for node, item in zip(placeholders(module.graph), inputs, strict=True):
        node._rename(item.name)
        node.target = item.name
