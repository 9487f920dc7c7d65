"""Compiles a call once for each signature and runs it on this rank; the model's forward and NodeTensor share it."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.export import Call, Captured, capture, plain_call
from sylvie_fx.capture.inputs import FlatCall
from sylvie_fx.graphs.sharded import ShardedGraph, Space
from sylvie_fx.ir.errors import BranchError, CaptureError
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.placement import REPLICATED, Placement, Rows
from sylvie_fx.ir.program import Input, Program, meta
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.manager import PassManager, Snapshot
from sylvie_fx.runtime.bind import Binder, Bound, run_prologue
from sylvie_fx.runtime.machine import Machine
from sylvie_fx.runtime.transport import Transport

log = logging.getLogger(__name__)

SAMPLE_SIZES = (307, 1409, 211, 89, 67, 53, 43, 37, 29, 23)
"""Rows of each space in a capture: primes, so that a product or sum of sizes is not taken for another size."""


@dataclass(eq=False)
class Sharding:
    """What a sharded tensor is part of.

    Attributes:
        graph: The sharded graph.
        space: The space whose rows it holds.
        dim: The dimension that carries them.
        whole: The global tensor, where it is part of the graph's structure (indices, masks, types, fixed edge data).
        index: The values name nodes.
    """

    graph: ShardedGraph
    space: Space
    dim: int = 0
    whole: Tensor | None = None
    index: bool = False


@dataclass(frozen=True)
class Leaf:
    """One tensor of a call: this rank's rows, and what they are rows of (None: the same on every rank)."""

    path: str
    local: Tensor
    sharding: Sharding | None


@dataclass(eq=False)
class Compiled:
    """A rewritten program and how its flat results become the call's result."""

    captured: Captured
    program: Program
    snapshots: list[Snapshot]
    stand_ins: list[Any]


@dataclass(eq=False)
class ProgramCache:
    """Programs by signature; ranks that are threads of one process share one.

    Attributes:
        programs: By the call's signature.
        fitted: Where Python branches were decided in the capture: by signature and graph, the program whose decisions hold
            on that graph, and the tensors whose identity is part of the key.
    """

    programs: dict[Hashable, Compiled] = field(default_factory=dict)
    fitted: dict[Hashable, tuple[Compiled, list[Tensor]]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(eq=False)
class _Binding:
    machine: Machine
    spaces: list[Space | None]
    kept: list[Tensor]


class Engine:
    """Compiles and runs calls on one rank.

    Args:
        transport: How ranks talk.
        options: The options of distribute().
        passes: The pipeline.
        cache: Shared programs.
    """

    def __init__(self, transport: Transport, options: Options, passes: PassManager, cache: ProgramCache | None = None) -> None:
        self.transport, self.options, self.passes = transport, options, passes
        self.cache = cache or ProgramCache()
        self.call: Call = plain_call
        self._bindings: dict[Hashable, _Binding] = {}

    def compile(self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, key: Hashable) -> tuple[Compiled, Hashable]:
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
        spaces = _spaces(leaves)
        signature = (key, call.key, tuple(_leaf_key(leaf) for leaf in leaves))
        with self.cache.lock:
            found = self.cache.programs.get(signature)
            if found is None:
                found = self._compile(module, leaves, call, spaces)
                self.cache.programs[signature] = found
        return self._fit(module, leaves, call, spaces, found, signature) if found.captured.decided else (found, signature)

    def _fit(self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, spaces: list[Space], found: Compiled,
             signature: Hashable) -> tuple[Compiled, Hashable]:  # fmt: skip
        """The program whose decided branches hold on the real graph: the one at hand, or one captured on that graph."""
        whole = _whole(found.program, leaves, spaces)
        given = [leaf.sharding.whole for leaf in leaves if is_static(leaf) and leaf.sharding and leaf.sharding.whole is not None]
        key = (signature, tuple((t.data_ptr(), t._version, tuple(t.shape)) for t in given), tuple(s.rows for s in spaces))
        with self.cache.lock:
            if key not in self.cache.fitted:
                assert found.program.prologue is not None
                try:
                    run_prologue(found.program.prologue, whole)
                except BranchError as error:
                    log.info("captured again, on the whole graph: %s", error)
                    found = self._compile(module, leaves, call, spaces, whole_graph=True)
                self.cache.fitted[key] = (found, given)
        return self.cache.fitted[key][0], key

    def _compile(self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, spaces: list[Space], *,
                 whole_graph: bool = False) -> Compiled:  # fmt: skip
        sizes = {space.name: SAMPLE_SIZES[i % len(SAMPLE_SIZES)] + 2 * (i // len(SAMPLE_SIZES)) for i, space in enumerate(spaces)}
        if whole_graph:
            sizes = {space.name: space.rows for space in spaces}
        inputs, samples, used = [], [], set[str]()
        for leaf in leaves:
            name = _unique(re.sub(r"\W+", "_", leaf.path).strip("_") or "x", used)
            inputs.append(Input(name, _placement(leaf), is_static(leaf), leaf.path))
            samples.append(_sample(leaf, sizes))
        for space in spaces:
            inputs.append(Input(_unique(f"marker_{space.name}", used), Rows(space.name), True, f"rows of {space.name}"))
            samples.append(torch.zeros(1, dtype=torch.bool).expand(sizes[space.name]))
        count = len(leaves)
        with torch.enable_grad(), call.active():
            captured = capture(module, inputs, samples, lambda tensors: call.rebuild(tensors[:count]), self.call, decide=whole_graph)
        program, snapshots = self.passes.run(captured.program, PassContext(self.options))
        return Compiled(captured, program, snapshots, list(call.stand_ins))

    def run(self, module: nn.Module, leaves: Sequence[Leaf], call: FlatCall, key: Hashable, step: int,
            wrap: Callable[[Tensor, ShardedGraph, Space, int], Tensor]) -> Any:  # fmt: skip
        """Run a call on this rank's rows.

        Args:
            module: What is called.
            leaves: The call's tensors.
            call: The call, taken apart.
            key: What else the program depends on: the mode, which parameters need gradients.
            step: Training step, part of dropout's key.
            wrap: Makes a sharded tensor of a result that lives in rows.
        """
        compiled, signature = self.compile(module, leaves, call, key)
        graph = _graph(leaves)
        binding = self._bind(module, compiled, signature, leaves, call, graph)
        names = [item.name for item in compiled.program.inputs]
        inputs = {name: leaf.local for name, leaf in zip(names, leaves, strict=False)}
        results = binding.machine.run(inputs, step)
        flat = []
        for value, space, place in zip(results, binding.spaces, _output_places(compiled.program), strict=True):
            flat.append(value if space is None or not isinstance(place, Rows) else wrap(value, graph, space, place.dim))
        tensors = iter(flat)
        merged = [next(tensors) if constant is None and is_tensor else constant
                  for constant, is_tensor in zip(compiled.captured.constants, compiled.captured.tensor_leaves, strict=True)]  # fmt: skip
        return pytree.tree_unflatten(merged, compiled.captured.tree)

    def _bind(self, module: nn.Module, compiled: Compiled, signature: Hashable, leaves: Sequence[Leaf],
              call: FlatCall, graph: ShardedGraph) -> _Binding:  # fmt: skip
        static = [leaf.sharding.whole for leaf in leaves if is_static(leaf) and leaf.sharding and leaf.sharding.whole is not None]
        spaces = _spaces(leaves)
        key = (signature, id(module), graph.number, tuple((id(t), t._version) for t in static), tuple(id(s) for s in spaces))
        if key not in self._bindings:
            program = compiled.program
            call.check(compiled.stand_ins)
            whole = _whole(program, leaves, spaces)
            binder = Binder(program, whole, {space.name: space.layout for space in spaces})
            device = next((leaf.local.device for leaf in leaves), torch.device("cpu"))
            bound = binder.for_rank(self.transport.rank, device)
            machine = Machine(program, bound, self.transport, device, self.options, root=module)
            self._bindings[key] = _Binding(machine, [_result_space(p, bound, binder, graph) for p in _output_places(program)], static)
        return self._bindings[key]

    def bound(self) -> list[tuple[Program, Bound]]:
        """The programs that have been bound on this rank."""
        return [(b.machine.program, b.machine.bound) for b in self._bindings.values()]


def is_static(leaf: Leaf) -> bool:
    """Whether a tensor is part of the graph's structure: indices, masks, integer data; edge data without gradient."""
    sharding = leaf.sharding
    if sharding is None or sharding.whole is None:
        return False
    if not leaf.local.dtype.is_floating_point:
        return True
    return sharding.space is not sharding.graph.spaces["N"] and not leaf.local.requires_grad


def _whole(program: Program, leaves: Sequence[Leaf], spaces: Sequence[Space]) -> dict[str, Tensor]:
    """The static inputs of a program on the whole graph."""
    whole = {}
    for item, leaf in zip(program.inputs, leaves, strict=False):
        if item.static:
            assert leaf.sharding is not None
            assert leaf.sharding.whole is not None
            whole[item.name] = leaf.sharding.whole
    for item, space in zip(program.inputs[len(leaves) :], spaces, strict=True):
        whole[item.name] = torch.zeros(1, dtype=torch.bool).expand(space.rows)
    return whole


def _graph(leaves: Sequence[Leaf]) -> ShardedGraph:
    graphs = list(dict.fromkeys(leaf.sharding.graph for leaf in leaves if leaf.sharding is not None))
    if not graphs:
        raise CaptureError(
            "no argument of the call is sharded", why="a distributed model runs on this rank's rows",
            remedy="pass what model.shard(...) returned",
        )  # fmt: skip
    if len(graphs) > 1:
        raise CaptureError("the arguments come from different calls of shard", remedy="shard everything that belongs to one graph in one call")
    return graphs[0]


def _spaces(leaves: Sequence[Leaf]) -> list[Space]:
    """The row spaces of a call: the nodes, and every space that an argument has rows of."""
    graph = _graph(leaves)
    return list(dict.fromkeys([graph.spaces["N"], *(leaf.sharding.space for leaf in leaves if leaf.sharding is not None)]))


def _placement(leaf: Leaf) -> Placement:
    return REPLICATED if leaf.sharding is None else Rows(leaf.sharding.space.name, leaf.sharding.dim)


def _leaf_key(leaf: Leaf) -> Hashable:
    local, sharding = leaf.local, leaf.sharding
    if sharding is None:
        return (leaf.path, str(local.dtype), tuple(local.shape), str(local.device))
    rest = tuple(s for d, s in enumerate(local.shape) if d != sharding.dim)
    return (leaf.path, str(local.dtype), rest, sharding.space.name, sharding.dim, is_static(leaf), str(local.device))


def _unique(name: str, used: set[str]) -> str:
    if name[0].isdigit():
        name = f"x_{name}"
    base, number = name, 0
    while name in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name)
    return name


def _sample(leaf: Leaf, sizes: dict[str, int]) -> Tensor:
    """A few rows in the place of the tensor: real values, repeated or cut to the capture's size; indices stay in range."""
    if leaf.sharding is None:
        return leaf.local.detach()
    dim, size = leaf.sharding.dim, sizes[leaf.sharding.space.name]
    source = leaf.sharding.whole if leaf.sharding.whole is not None else leaf.local.detach()
    have = source.shape[dim]
    if have == 0:
        shape = list(source.shape)
        shape[dim] = size
        return source.new_zeros(shape, device=leaf.local.device)
    sample = source.detach().index_select(dim, torch.arange(size, device=source.device) % have).to(leaf.local.device)
    if leaf.sharding.index:
        sample = sample % sizes["N"]
    return sample.requires_grad_(leaf.local.requires_grad)


def _output_places(program: Program) -> list[Placement]:
    output = next(n for n in program.graph.nodes if n.op == "output")
    places = []
    for node in output.args[0]:
        place = meta(node).placement
        places.append(place if isinstance(place, Rows) else REPLICATED)
    return places


def _result_space(place: Placement, bound: Bound, binder: Binder, graph: ShardedGraph) -> Space | None:
    if not isinstance(place, Rows):
        return None
    if not place.component and place.space in graph.spaces:
        return graph.spaces[place.space]
    return graph.subset(binder.layout(place.component or 0, place.space))
