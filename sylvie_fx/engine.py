"""Compiles a call once for each signature and runs it on this rank; the model's forward and NodeTensor share it."""

from __future__ import annotations

import itertools
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.alone import CAPTURING
from sylvie_fx.capture.export import Call, Captured, capture, plain_call
from sylvie_fx.capture.inputs import FlatCall
from sylvie_fx.clock import Moment
from sylvie_fx.debug import DebugOptions
from sylvie_fx.ends import results_of, whole_inputs
from sylvie_fx.graphs.sharded import ShardedGraph, Space
from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import BranchError, CaptureError, OptionError
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import Input, Program
from sylvie_fx.ir.views import viewed_inputs
from sylvie_fx.ir.written import stamp
from sylvie_fx.leaves import (
    Leaf,
    Sharding,
    entry_placement,
    graph_of,
    is_static,
    leaf_key,
    names_of,
    sample_of,
    spaces_of,
    unique_name,
)
from sylvie_fx.memory import place_of
from sylvie_fx.naming import Names
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.manager import PassManager, Snapshot
from sylvie_fx.runtime.bind import Binder, Bound, run_prologue
from sylvie_fx.runtime.link_speed import LinkSpeed
from sylvie_fx.runtime.machine import Machine
from sylvie_fx.runtime.metered import MeteredTransport

log = logging.getLogger(__name__)

SAMPLE_SIZES = (307, 1409, 211, 89, 67, 53, 43, 37, 29, 23)
"""Rows of each space in a capture: primes, so that a product or sum of sizes is not taken for another size."""

MOST_BINDINGS = 128
"""Programs bound to data that are kept; a script that makes masks anew in every step would bind without end."""


@dataclass(eq=False)
class Compiled:
    """A rewritten program and how its flat results become the call's result.

    Attributes:
        captured: What was captured.
        program: What became of it.
        snapshots: The program after every pass.
        stand_ins: The graphs that the model saw during the capture.
        views: For each result the input that it is a view of, if any, on one device.
        again: Why it was captured on the whole graph, for which a sample did not do; empty for a capture on a sample.
    """

    captured: Captured
    program: Program
    snapshots: list[Snapshot]
    stand_ins: list[Any]
    views: list[int | None]
    again: str = ""

    @cached_property
    def draws(self) -> bool:
        """Whether the program draws dropout masks."""
        return any(node.target is ops.node_dropout for node in self.program.graph.nodes)


@dataclass(eq=False)
class ProgramCache:
    """Programs by signature; ranks that are threads of one process share one.

    Attributes:
        programs: By the call's signature.
        fitted: Where Python branches were decided in the capture: by signature and graph, the program whose decisions
            hold on that graph, and the tensors whose identity is part of the key.
    """

    programs: dict[Hashable, Compiled] = field(default_factory=dict)
    fitted: dict[Hashable, tuple[Compiled, list[Tensor]]] = field(default_factory=dict)


@dataclass(eq=False)
class _Binding:
    machine: Machine
    results: list[Sharding | None]
    memory: set[int]  # of what every step reads
    static: list[Tensor]  # these two are kept since their identity is part of the binding's key
    spaces: list[Space]


class Function(nn.Module):
    """A function of torch as a module, for the capture."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.function(*args, **kwargs)


class Engine:
    """Compiles and runs calls on one rank.

    Args:
        transport: How ranks talk.
        options: The options of distribute().
        passes: The pipeline.
        cache: Shared programs.
        debug: What to log.
    """

    def __init__(
        self,
        transport: MeteredTransport,
        options: Options,
        passes: PassManager,
        cache: ProgramCache | None = None,
        debug: DebugOptions | None = None,
    ) -> None:
        if (options.staleness or options.policy is not None) and "split-exchanges" not in passes.names:
            raise OptionError(
                f"staleness={options.staleness!r}, policy={options.policy!r} with a pipeline without split-exchanges",
                why="only an exchange in two halves can be late",
                remedy="keep the pass, or leave these options out",
            )
        self.transport, self.options, self.passes = transport, options, passes
        self.debug = debug or DebugOptions()
        self.cache = cache or ProgramCache()
        self.call: Call = plain_call
        self.link = LinkSpeed(1.0 if isinstance(options.link, str) else float(options.link))
        self._link_is_known = not isinstance(options.link, str)
        self.draws = itertools.count()
        self._names = Names(transport)
        self._bindings: OrderedDict[Hashable, _Binding] = OrderedDict()

    def ask_link(self, device: torch.device) -> None:
        """Find the speed of the link once, where it was not given; all ranks call it together."""
        if not self._link_is_known:
            self._link_is_known = True
            self.link = self.transport.link_speed(device, self.options.link == "measure")

    def compile(
        self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, key: Hashable
    ) -> tuple[Compiled, Hashable]:
        """The program for a call, captured and rewritten on first use.

        Args:
            module: What is called.
            leaves: The call's tensors.
            call: The call, taken apart.
            key: What else the program depends on: the mode, which parameters need gradients.

        Raises:
            CaptureError: It can not be captured.
            PassError: It can not be distributed exactly.
        """
        spaces = spaces_of(leaves)
        names = names_of(spaces)
        signature = (key, call.key, tuple(leaf_key(leaf, names) for leaf in leaves))
        if (found := self.cache.programs.get(signature)) is None:
            with CAPTURING:
                found = self._first(module, leaves, call, spaces, signature)
        captured = found.captured
        if captured.learned and torch.is_grad_enabled():
            raise CaptureError(
                "forward assigns a value with a gradient to a buffer", where=captured.learned,
                why="the gradient would have to pass from one call to the next",
                remedy="assign value.detach(), or call the model under torch.no_grad()",
            )  # fmt: skip
        if captured.decided or min(space.rows for space in spaces) < captured.least > 2:
            return self._fit(module, leaves, call, spaces, found, signature)
        return found, signature

    def _first(
        self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, spaces: list[Space], signature: Hashable
    ) -> Compiled:
        """The program of a signature that had none when it was asked for; another thread may have made it since."""
        found, again = self.cache.programs.get(signature), ""
        if found is None:
            try:
                found = self._compile(module, leaves, call, spaces)
            except BranchError as error:  # the sample is no graph for this model
                again = str(error)
            # Outside of the handler, so that what fails now is not taken to be caused by that.
            found = found or self._compile(module, leaves, call, spaces, again=again)
            self.cache.programs[signature] = found
        return found

    def _fit(
        self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, spaces: list[Space], found: Compiled,
        signature: Hashable,
    ) -> tuple[Compiled, Hashable]:  # fmt: skip
        """The program that holds on the real graph: the one at hand, or one captured with that graph's sizes and structure."""
        whole = whole_inputs(found.program, leaves, spaces)
        given = _structure(leaves)
        key = (
            signature,
            tuple((t.data_ptr(), stamp(t), tuple(t.shape)) for t in given),
            tuple(s.rows for s in spaces),
        )
        with CAPTURING:
            if key not in self.cache.fitted:
                broken = _broken(found, whole, spaces)
                if broken:
                    log.info("captured again, on the whole graph: %s", broken)
                    found = self._compile(module, leaves, call, spaces, again=broken, decide=found.captured.ran)
                self.cache.fitted[key] = (found, given)
        return self.cache.fitted[key][0], key

    def _compile(
        self,
        module: nn.Module,
        leaves: Sequence[Leaf],
        call: FlatCall,
        spaces: list[Space],
        *,
        again: str = "",
        decide: bool = False,
    ) -> Compiled:
        """Capture on a sample and rewrite; on the whole graph where ``again`` says why that must be."""
        names, whole_graph = names_of(spaces), bool(again)
        sizes = {
            names[space]: SAMPLE_SIZES[i % len(SAMPLE_SIZES)] + 2 * (i // len(SAMPLE_SIZES))
            for i, space in enumerate(spaces)
        }
        if whole_graph:
            sizes = {names[space]: space.rows for space in spaces}
        inputs, samples, used = [], [], set[str]()
        for leaf in leaves:
            name = unique_name(re.sub(r"\W+", "_", leaf.path).strip("_") or "x", used)
            inputs.append(Input(name, entry_placement(leaf, names), is_static(leaf), leaf.path))
            samples.append(sample_of(leaf, sizes, names))
        for called in names.values():
            inputs.append(Input(unique_name(f"marker_{called}", used), Rows(called), True, f"rows of {called}"))
            samples.append(torch.zeros(1, dtype=torch.bool).expand(sizes[called]))
        count = len(leaves)
        with torch.enable_grad(), call.active():
            captured = capture(
                module,
                inputs,
                samples,
                lambda tensors: call.rebuild(tensors[:count]),
                self.call,
                decide=decide,
                fixed=whole_graph,
            )
        # Not on the whole graph: it would run there, on every rank.
        original = None if isinstance(module, Function) or whole_graph else captured.program.snapshot()
        options = self.options.outside() if isinstance(module, Function) else self.options
        context = PassContext(options, original, tuple(samples), self.link.link)
        views = viewed_inputs(captured.program)
        program, snapshots = self.passes.run(captured.program, context)
        if not isinstance(module, Function):
            self.debug.show(snapshots)
        return Compiled(captured, program, snapshots, list(call.stand_ins), views, again)

    def run(
        self,
        module: nn.Module,
        found: tuple[Compiled, Hashable],
        leaves: Sequence[Leaf],
        call: FlatCall,
        moment: Moment,
        wrap: Callable[[Tensor, Sharding, int | None], Tensor],
    ) -> Any:
        """Run a call on this rank's rows.

        Args:
            module: What is called.
            found: What :meth:`compile` gave for this call.
            leaves: The call's tensors.
            call: The call, taken apart.
            moment: When, in numbers that all ranks agree on.
            wrap: Makes a sharded tensor of a result that lives in rows; it is told which leaf the result is a view of.
        """
        compiled, signature = found
        graph = graph_of(leaves)
        with torch.inference_mode(False):  # what is bound serves later calls, which may need gradients
            binding = self._bind(module, compiled, signature, leaves, call, graph)
        names = [item.name for item in compiled.program.inputs]
        inputs = {name: leaf.local for name, leaf in zip(names, leaves, strict=False)}
        results = binding.machine.run(inputs, moment.step, moment.draw, moment.update)
        results = [v.clone() if place_of(v) in binding.memory else v for v in results]  # a user may write there
        flat = [
            v if part is None else wrap(v, part, base)
            for v, part, base in zip(results, binding.results, compiled.views, strict=True)
        ]
        tensors = iter(flat)
        captured = compiled.captured
        leaves_of_result = zip(captured.constants, captured.tensor_leaves, strict=True)
        merged = [next(tensors) if is_tensor else constant for constant, is_tensor in leaves_of_result]
        result, values = pytree.tree_unflatten(merged, captured.tree)
        for (path, name), value in zip(captured.assigned, values, strict=True):
            _assign(module, path, name, value)
        return result

    def _bind(
        self,
        module: nn.Module,
        compiled: Compiled,
        signature: Hashable,
        leaves: Sequence[Leaf],
        call: FlatCall,
        graph: ShardedGraph,
    ) -> _Binding:
        static = _structure(leaves)
        spaces = spaces_of(leaves)
        key = (
            signature,
            id(module),
            graph.number,
            tuple((id(t), stamp(t)) for t in static),
            tuple(id(s) for s in spaces),
        )
        binding = self._bindings.get(key)
        if binding is None:
            program, names = compiled.program, names_of(spaces)
            call.check(compiled.stand_ins)
            binder = Binder(
                program, whole_inputs(program, leaves, spaces), {names[space]: space.layout for space in spaces}
            )
            device = next((leaf.local.device for leaf in leaves), torch.device("cpu"))
            bound = binder.for_rank(self.transport.rank, device)
            title = getattr(module.function, "__name__", "function") if isinstance(module, Function) else program.mode
            name = self._names.name(title, program, static, spaces)
            machine = Machine(
                program,
                bound,
                self.transport,
                device,
                self.options,
                name,
                root=module,
                recorder=self.transport.recorder,
            )
            memory = {place_of(value) for value in bound.values.values()} - {0}
            results = results_of(program, binder, graph, spaces)
            binding = self._bindings[key] = _Binding(machine, results, memory, static, spaces)
            if len(self._bindings) > MOST_BINDINGS:
                self._bindings.popitem(last=False)[1].machine.close()
        else:
            self._bindings.move_to_end(key)
        return binding

    def bound(self) -> list[tuple[Program, Bound]]:
        """The programs that have been bound on this rank."""
        return [(b.machine.program, b.machine.bound) for b in self._bindings.values()]

    def notes(self, program: Program) -> list[str]:
        """What the machine of a program has decided while it ran; nothing where it has not run."""
        return next((b.machine.notes() for b in self._bindings.values() if b.machine.program is program), [])


def _assign(module: nn.Module, path: str, name: str, value: Any) -> None:
    """Set an attribute; not through nn.Module, since a rank in another thread may be capturing."""
    for part in path.split(".") if path else ():
        module = vars(module)["_modules"][part]
    buffers = vars(module)["_buffers"]
    (buffers if name in buffers else vars(module))[name] = value


def _structure(leaves: Sequence[Leaf]) -> list[Tensor]:
    """The whole tensors of a call that are part of the graph's structure."""
    found = (leaf.sharding.whole for leaf in leaves if leaf.sharding is not None and is_static(leaf))
    return [whole for whole in found if whole is not None]


def _broken(compiled: Compiled, whole: dict[str, Tensor], spaces: Sequence[Space]) -> str:
    """What the capture took for granted and does not hold on the whole graph; empty where all does."""
    assert compiled.program.prologue is not None
    if min(space.rows for space in spaces) < compiled.captured.least > 2:
        return f"it has fewer than {compiled.captured.least} rows"
    try:
        run_prologue(compiled.program.prologue, whole)
    except BranchError as error:
        return str(error)
    return ""
