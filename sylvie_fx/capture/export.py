"""From a module and sample inputs to a program, by torch.export in its training IR.

Sizes of row spaces are symbols of the export, so that the program fits any graph. Where plain export refuses Python
branches on values, they are decided by an eager run (capture/decisions.py).
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.cleaning import clean, placeholders
from sylvie_fx.capture.decisions import Decision, Replaying, record
from sylvie_fx.capture.failures import (
    Place,
    conditions,
    depends_on_sizes,
    explain_failure,
    first_line,
    in_module,
    is_data_dependent,
    located,
    own_error,
    place_of,
    raised_at,
)
from sylvie_fx.capture.own_gradients import refused_own_gradients
from sylvie_fx.capture.python_random import refuse_draws, states
from sylvie_fx.capture.regions import inline_regions
from sylvie_fx.capture.size_numbers import sizes_as_numbers
from sylvie_fx.capture.sparse import patched_sparse
from sylvie_fx.capture.spellings import Spellings
from sylvie_fx.capture.state import Attribute, Change, Watch, refuse_hidden_parameters, restored
from sylvie_fx.ir import ops
from sylvie_fx.ir.decided import decided as decided_operator
from sylvie_fx.ir.errors import BranchError, CaptureError, SylvieError
from sylvie_fx.ir.placement import NODES, Rows
from sylvie_fx.ir.program import Input, Program, meta
from sylvie_fx.ir.rules import expression

log = logging.getLogger(__name__)

Rebuild: TypeAlias = Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]
Call: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Watch], Any]


def plain_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> Any:
    """``model(*args, **kwargs)``, watched."""
    return watch.call(model, args, kwargs)


MOST_CALLS = 20_000
"""Torch functions of one forward pass: a loop over the nodes of a large graph would be captured without end."""


@dataclass(frozen=True)
class Captured:
    """A captured forward pass.

    Attributes:
        program: The program, whose output is the flat list of the result's tensors.
        constants: Leaves of the result: constants as they are, None in the place of each tensor.
        tensor_leaves: Which leaves are tensors.
        tree: Structure of the result and, beside it, of the values of ``assigned``.
        assigned: Attributes that the forward pass assigns.
        learned: The line that assigns a value with a gradient to a buffer; empty where none does.
        reads: Attributes that the forward pass reads before it assigns them.
        decided: Python branches or numbers were taken from the samples; the program checks on the real graph that they hold.
        ran: The model was run on the samples to decide branches.
        least: Rows that every space must have for the program to be valid.
    """

    program: Program
    constants: tuple[Any, ...]
    tensor_leaves: tuple[bool, ...]
    tree: pytree.TreeSpec
    assigned: tuple[Attribute, ...] = ()
    learned: str = ""
    reads: tuple[Attribute, ...] = ()
    decided: bool = False
    ran: bool = False
    least: int = 2


class _Wrapper(nn.Module):
    """Gives the model the call that its user makes, from flat tensors."""

    def __init__(self, model: nn.Module, rebuild: Rebuild, call: Call, record: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self._rebuild, self._call = rebuild, call
        # Callables, since torch.export undoes what forward assigns to attributes and containers of the module.
        self._record = record
        self.decisions: list[Decision] | None = None
        environments: list[Any] = []
        guarded: dict[Any, Place] = {}
        numbers: list[bool] = []
        self.environments: Callable[[], list[Any]] = lambda: environments
        self.guarded: Callable[[], dict[Any, Place]] = lambda: guarded
        self.numbers: Callable[[], list[bool]] = lambda: numbers
        watch = Watch()
        self.watch: Callable[[], Watch] = lambda: watch
        self._calls, self._conditions = [0], [0]
        self._states: tuple[Any, Any] | None = None

    def _after(self, frames: list[FrameType]) -> None:
        """Stop a loop without end; remember which of the model's lines made torch rely on something about sizes."""
        self._calls[0] += 1
        if self._calls[0] > MOST_CALLS:
            place = place_of(frames, self.model)
            raise CaptureError(
                in_module(f"the forward pass calls more than {MOST_CALLS} torch functions", place), where=place[0] or None,
                why="it loops over nodes or edges, and each round becomes part of the program",
                remedy="replace the loop by tensor operations over all rows",
            )  # fmt: skip
        if self._states is not None and states() != self._states:
            refuse_draws(self._states, place_of(frames, self.model))
        for sizes in self.environments()[-1:]:
            known, seen = conditions(sizes), self._conditions[0]
            self._conditions[0] = len(known)
            if len(known) != seen:  # nothing is compared after each of many calls
                guarded, place = self.guarded(), place_of(frames, self.model)
                guarded.update({c: place for c, _ in known if c not in guarded})

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        every: list[Any] = [s for t in tensors for s in t.shape]
        self.guarded().clear()
        self.numbers().clear()
        self._calls[0] = self._conditions[0] = 0
        for size in (s for s in every if isinstance(s, torch.SymInt)):
            self.environments().append(size.node.shape_env)
            break
        args, kwargs = self._rebuild(tensors)
        replaying = contextlib.nullcontext() if self.decisions is None else Replaying(self.decisions)
        numbers = sizes_as_numbers(lambda: self.numbers().append(True))
        with (
            torch.fx.traceback.preserve_node_meta(),
            Spellings(self._after),
            patched_sparse(),
            refused_own_gradients(),
            replaying,
            numbers,
        ):
            watch = self.watch()
            self._states = states()
            result = self._call(self.model, args, kwargs, watch)
        refuse_draws(self._states, ("", ""))
        leaves, tree = pytree.tree_flatten((result, [change.value for change in watch.assigned]))
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
            decide: bool = False, fixed: bool = False) -> Captured:  # fmt: skip
    """Capture one forward pass in the model's present mode.

    Args:
        model: The unmodified module; its ``training`` flags decide what is captured.
        inputs: What each tensor is; the row spaces become symbols.
        samples: One small tensor for each input; every space has one size throughout.
        rebuild: Makes the arguments of the call from the flat tensors (stand-ins for graphs included).
        call: How the model is called with them.
        decide: Decide Python branches on the samples at once, without trying to do without.
        fixed: The program need fit no other sizes than the samples'.

    Raises:
        CaptureError: The forward pass can not be captured; names the user's line and the reason.
        BranchError: It can, but not from samples of other sizes than the graph's.
    """
    results: list[tuple[tuple[Any, ...], tuple[bool, ...], pytree.TreeSpec]] = []
    wrapper = _Wrapper(model, rebuild, call, results.append)
    wrapper.training = model.training
    if decide:
        wrapper.decisions = _decide(wrapper, samples)
    with restored(model):
        exported, least = _export_for(wrapper, inputs, samples, fixed)
        watch, result = wrapper.watch(), results[-1]
        reads = tuple(sorted(watch.reads))
        assigned, learned = tuple(change.attribute for change in watch.assigned), "".join(watch.learned[:1])
        for change in _carried(wrapper, samples, fixed) if watch.carried else []:
            raise change.refused()
    refuse_hidden_parameters(model, reads)
    for change in watch.assigned:
        path, name = change.attribute
        if name in model.get_submodule(path)._buffers and not change.buffer:  # a stand-in for its rows was assigned
            raise change.refused()
    module = exported.module(check_guards=False)
    inline_regions(module)
    answered = any(n.target is decided_operator for n in module.graph.nodes)
    decided = fixed or wrapper.decisions is not None or answered
    clean(module, decided=decided)
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
    if fixed:
        _check_rows(module.graph, inputs, samples)
    program = Program(module, list(inputs), sizes, "train" if model.training else "eval")
    for node in program.graph.nodes:
        meta(node)
    return Captured(
        program, *result, assigned, learned, reads, decided=decided, ran=wrapper.decisions is not None, least=least
    )


_ENOUGH = 32
_MOST = {NODES: 2**31}


def _export_for(wrapper: _Wrapper, inputs: Sequence[Input], samples: Sequence[Tensor], fixed: bool) -> tuple[Any, int]:
    """The exported model, and the rows that every space must have for it to be valid."""
    rows = {
        i.rows.space: int(t.shape[i.rows.dim]) for i, t in zip(inputs, samples, strict=True) if isinstance(i.rows, Rows)
    }
    if fixed:
        # Not this size alone, which torch.export would make a constant; but as few as can be, so that comparisons have one
        # outcome. Where a size is divided, two are too few for torch.
        near = {s: (n, n + 1) for s, n in rows.items()}
        with contextlib.suppress(_SizesMatter):
            return _export(wrapper, list(samples), _dynamic(inputs, near), fixed=True), 2
        return _export(wrapper, list(samples), _dynamic(inputs, _wide(rows, 0)), fixed=True, last=True), 2
    for least in (2, _ENOUGH):
        # From fewer rows on the pass may differ: x[1:] and x[:-1] meet where there are two, say.
        with contextlib.suppress(_SizesMatter):
            return _export(wrapper, list(samples), _dynamic(inputs, _wide(rows, least))), least
        if wrapper.numbers():  # then it is no matter of a few rows
            break
    raise BranchError("the forward pass is not the same for every number of rows",
                      remedy="capture it with the sizes of the graph")  # fmt: skip


def _wide(spaces: Iterable[str], least: int) -> dict[str, tuple[int, int]]:
    # Bounded, so that models that check sizes against the range of an index are captured.
    return {space: (least, _MOST.get(space, 2**40)) for space in spaces}


class _SizesMatter(Exception):
    """The forward pass differs between the sizes that were asked for."""


def _dynamic(inputs: Sequence[Input], bounds: Mapping[str, tuple[int, int]]) -> list[Any]:
    """The dynamic dimension of each input that has rows."""
    dims: dict[str, Any] = {}
    specs: list[Any] = []
    for item in inputs:
        if isinstance(item.rows, Rows):
            space = item.rows.space
            if space not in dims:
                least, most = bounds[space]
                dims[space] = torch.export.Dim(_symbol(space, len(dims)), min=least, max=most)
            specs.append({item.rows.dim: dims[space]})
        else:
            specs.append(None)
    return specs


def _symbol(space: str, index: int) -> str:
    return {"N": "nodes", "E": "edges"}.get(space, f"rows{index}")


def _check_rows(graph: fx.Graph, inputs: Sequence[Input], samples: Sequence[Tensor]) -> None:
    """Check on the real graph that it has the rows of the samples."""
    checked = set()
    output = next(n for n in graph.nodes if n.op == "output")
    for node, item, sample in zip(placeholders(graph), inputs, samples, strict=True):
        if item.static and isinstance(item.rows, Rows) and item.rows.space not in checked:
            checked.add(item.rows.space)
            rows = int(sample.shape[item.rows.dim])
            what = f"the number of {_symbol(item.rows.space, len(checked) - 1)} is {rows}"
            with graph.inserting_before(output):
                graph.call_function(ops.check_size, (node, ["size", item.rows.dim], rows, what))


def _decide(wrapper: _Wrapper, samples: Sequence[Tensor]) -> list[Decision]:
    rows = max((t.shape[0] for t in samples if t.dim()), default=0)
    log.info("the model is run once without gradients, on up to %d rows, to decide Python branches on values", rows)
    return record(wrapper.model, lambda: wrapper([t.detach() for t in samples]))


def _carried(wrapper: _Wrapper, samples: Sequence[Tensor], fixed: bool) -> list[Change]:
    """What a second call would change again: not what the first computes and keeps. The model is run eagerly to see."""
    wrapper.decisions = None

    def twice() -> None:
        for _ in range(2):
            wrapper([t.detach() for t in samples])

    try:
        record(wrapper.model, twice)
    except SylvieError:
        raise
    except Exception as error:
        if fixed:
            raise
        raise BranchError(
            f"the forward pass raises {type(error).__name__}: {first_line(error)}", where=wrapper.watch().carried[0].line,
            why="it keeps values from one call to the next, and was run on a sample of the graph to see which",
        ) from error  # fmt: skip
    return wrapper.watch().carried


def _export(
    wrapper: _Wrapper, samples: list[Tensor], specs: list[Any], *, fixed: bool = False, last: bool = False
) -> Any:
    try:
        with _quiet():
            return torch.export.export(wrapper, (samples,), dynamic_shapes=(specs,), strict=False,
                                       prefer_deferred_runtime_asserts_over_guards=fixed)  # fmt: skip
    except Exception as error:
        own = own_error(error)
        if own is not None:
            raise located(own, wrapper.model) from error
        if not last and depends_on_sizes(error):
            raise _SizesMatter from error
        if is_data_dependent(error) and wrapper.decisions is None:
            failure = error
        elif wrapper.numbers() and not fixed:
            raise _SizesMatter from error
        else:
            raise explain_failure(error, wrapper.model, wrapper.environments(), wrapper.guarded()) from error
    try:
        wrapper.decisions = _decide(wrapper, samples)
    except SylvieError:
        raise
    except Exception as error:
        if fixed:  # what the unmodified model raises on this graph
            raise
        # The sample may lack what the model needs (sorted edges, say): the caller may try the whole graph instead.
        place = raised_at(error, wrapper.model)
        raise BranchError(
            in_module(f"the forward pass raises {type(error).__name__}: {first_line(error)}", place), where=place[0] or None,
            why="it branches on the graph, and was run on a sample of it to decide the branches",
        ) from failure  # fmt: skip
    return _export(wrapper, samples, specs, fixed=fixed, last=last)


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
