"""Runs the main graph of a program on one rank: local operators as they are, crossing ones over the transport."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from sylvie_fx.ir import ops
from sylvie_fx.ir.coding import WARM
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.program import Program
from sylvie_fx.ir.written import version
from sylvie_fx.kernels.dropout import Drop, keyed_dropout
from sylvie_fx.kernels.row_dots import row_dots
from sylvie_fx.runtime.adaptor import Adaptor
from sylvie_fx.runtime.aggregation import Aggregations, drawn_inside
from sylvie_fx.runtime.bind import Bound
from sylvie_fx.runtime.coded_exchange import CodedHaloExchange, CodedHaloReduce
from sylvie_fx.runtime.crossing import HaloStart, HaloWait
from sylvie_fx.runtime.ending import Remains, expect
from sylvie_fx.runtime.exchange import AllReduce, HaloExchange, HaloReduce, Link, ReplicatedOutput, SyncGradients, apply
from sylvie_fx.runtime.gradients import Reduction, SyncFinish, SyncStart
from sylvie_fx.runtime.kept import KeptValues
from sylvie_fx.runtime.lanes import Courier
from sylvie_fx.runtime.metered import MeteredTransport
from sylvie_fx.runtime.recompute import Stretch
from sylvie_fx.runtime.sites import Exchanges
from sylvie_fx.runtime.timeline import Recorder
from sylvie_fx.runtime.tracing import traced
from sylvie_fx.runtime.turns import Turns


class Machine:
    """One rank's executor of a bound program.

    Args:
        program: The rewritten program.
        bound: Prologue results, plans and counts of this rank.
        transport: How ranks talk.
        device: Where the rows live.
        options: The options of distribute().
        name: In errors and labels; the same on every rank, and no other machine's.
        root: This rank's model, whose parameters and buffers are read; by default the one that was captured.
        recorder: Takes an event for each operator while it is on.
    """

    def __init__(
        self,
        program: Program,
        bound: Bound,
        transport: MeteredTransport,
        device: torch.device,
        options: Options,
        name: str,
        root: nn.Module | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.program, self.bound, self.transport, self.seed = program, bound, transport, options.seed
        self.recorder = recorder or Recorder(transport.rank)
        self._name = name
        self.links = {
            slot.number: Link.make(
                bound.plans[slot.number], transport, f"{self._name} exchange {slot.number}", device, self.recorder
            )
            for slot in program.slots
        }  # fmt: skip
        self._courier = Courier(
            self._name, transport.timeout, threaded=transport.threaded and device.type == "cpu",
            counters=transport.counters, recorder=self.recorder,
        )  # fmt: skip
        own_site = functools.partial(dropout_key, self.seed, 0x51)
        exchanges = Exchanges(program, bound, self.links, transport, self._courier, options, own_site, self._name)
        self._exchanges, self._sites = exchanges, exchanges.whole
        self._turns = Turns(exchanges.halves, exchanges.more.make)
        self._remains = Remains(exchanges.more.ways, self._courier.close, transport.timeout)
        weakref.finalize(self, expect(self._remains)).atexit = False
        self._reduction: Reduction | None = None
        self._widths = exchanges.controller(options)
        self._adaptor = Adaptor(exchanges.halves, program.paces, options, transport, self.recorder)
        self._once: dict[int, Tensor] = {}
        self._dynamic = [item.name for item in program.inputs if not item.static]
        self._kept: tuple[tuple[Any, ...], list[Tensor]] | None = None
        self._relayout = {
            n: link.plan.local_index.to(device) for n, link in self.links.items() if program.slots[n].kind == "relayout"
        }
        self._root = root
        self.aggregations = Aggregations({
            bound.values[name].data_ptr(): bound.plans[known.slot].own
            for name, known in program.localized.items()
            if known.slot is not None
        }, [bound.values[name].data_ptr() for name in (*program.localized, *program.row_ids)
            if isinstance(bound.values[name], Tensor)])  # fmt: skip
        self._masks = drawn_inside(program.graph)
        self._values = KeptValues(program.graph, options.recompute)
        self._draw, self._pass = 0, -1  # numbers of the draw and of the pass under way

    @property
    def codings(self) -> dict[int, tuple[str, str]]:
        """The present codings of coded exchanges by site, towards the halo and back."""
        return self._exchanges.codings

    def close(self) -> None:
        """Take what is still under way, so that no peer waits for it to leave, and end the threads."""
        self._remains.end()

    def notes(self) -> list[str]:
        """What is decided while the program runs, a line each, for explain()."""
        lines = []
        if self._sites or self._exchanges.halves:
            where = "in threads of their own" if self._courier.threaded else "in the thread that computes"
            lines += [f"rows are coded and received {where}", self.transport.wires()]
        for site, (out, back) in self.codings.items():
            if self.program.codings[site].auto:
                lines.append(f"site {site}: {out} / {back} at present")
        warm = max((c.warm_up for e in self.program.codings.values() for c in (e.forward, e.backward)), default=0)
        if warm > 1:
            lines.append(
                f"rows coded against a shift cross exactly in the first step, and at {WARM.bits} bits until step {warm}"
            )
        return lines + self._turns.notes() + self._adaptor.notes()

    def run(
        self, inputs: Mapping[str, Tensor], step: int, draw: int | None = None, update: int | None = None
    ) -> list[Any]:
        """One forward pass.

        Args:
            inputs: Dynamic inputs by placeholder name, this rank's rows.
            step: Number of the training step.
            draw: Part of the dropout masks' key, another one for every pass that draws; by default the step.
            update: How often the parameters have changed: what rows of earlier passes are old by; by default the step.

        Returns:
            The results in the order of the captured output.
        """
        draw = step if draw is None else draw
        self._pass += 1
        if self._values or any(coding.once for coding in self.program.codings.values()):
            self._forget_changed(inputs)
        update = step if update is None else update
        if self._turns.begin(update):
            self._adaptor.begin(self._turns.now, update)
        if self._widths is not None:
            for way in self._exchanges.more.ways:  # what has not left yet would leave at another width
                way.settle()
            if self._turns.new_step:
                self._widths.begin(self._turns.steps)
            self._exchanges.recode(self._turns.now)
        values, nodes, last_use = self._values.begin()
        for node in nodes:
            if isinstance(node, Stretch):
                values |= node.run(values, functools.partial(self._evaluate_at, draw))
            elif node.op == "placeholder":
                values[node] = self.bound.values[node.name] if node.name in self.bound.values else inputs[node.name]
            elif node.op == "get_attr":
                values[node] = self._attribute(str(node.target))
            elif node.op == "output":
                return self._values.end(_lookup(node.args[0], values))
            else:
                values[node] = self._evaluate_at(draw, node, values)
                self._values.note(node, values[node])
            for used in last_use.get(node, ()):
                values.pop(used, None)
        raise AssertionError("a program ends with an output")

    def _evaluate_at(self, draw: int, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Run an operator as part of a pass; in a backward pass, that may not be the last one that began."""
        args, kwargs = _lookup(node.args, values), _lookup(node.kwargs, values)
        last, self._draw = self._draw, draw
        try:
            if self.recorder.on:
                return traced(self.recorder, self._name, node, args, kwargs, self._call)
            return self._call(node, args, kwargs)
        finally:
            self._draw = last

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if node.target in self.aggregations.targets:
            return self.aggregations.run(node, args)
        if node in self._masks:
            if node.target is not ops.node_dropout:
                return None
            _, keys, p, site = args[:4]
            return Drop(keys, p, dropout_key(self.seed, self._draw, site))
        target: Any = node.target
        if target in _AMONG_RANKS and self.transport.size == 1:
            return args[0]
        ours = _CALLS.get(target)
        return target(*args, **kwargs) if ours is None else ours(self, *args, **kwargs)

    def _attribute(self, path: str) -> Any:
        if self._root is not None and path.startswith("model."):
            return _member(self._root, path.removeprefix("model."))
        return _member(self.program.module, path)

    def _label(self, text: str) -> str:
        return f"{self._name} {text}"

    def _link(self, slot: int) -> Link | None:
        link = self.links[slot]
        if link.plan.total == 0:
            return None
        return link

    def _halo_exchange(self, x: Tensor, slot: int, dim: int = 0, site: int = -1) -> Tensor:
        link = self._link(slot)
        if link is None:
            return x
        coded = self._sites.get(site)
        if coded is not None:
            return _along(dim, x, lambda rows: apply(CodedHaloExchange, rows, coded, self._pass))
        if site >= 0 and self.program.codings[site].once:
            return self._crossed_once(x, site, lambda: _along(dim, x, lambda rows: apply(HaloExchange, rows, link)))
        return _along(dim, x, lambda rows: apply(HaloExchange, rows, link))

    def _crossed_once(self, x: Tensor, site: int, exchange: Callable[[], Tensor]) -> Tensor:
        """A value that depends on inputs alone: exchanged again only when an input of any rank has changed."""
        if site not in self._once:
            self._once[site] = exchange()
        return self._once[site]

    def _forget_changed(self, inputs: Mapping[str, Tensor]) -> None:
        """Forget what crossed once, on every rank, where an input has changed on any.

        An input is the same if it is the same memory, unchanged; it is kept, so that no other can take its place there.
        Ranks must agree: one that repeats an exchange while another does not would wait for ever.
        """
        given = [inputs[name] for name in self._dynamic if name in inputs]
        uncounted = any(t.is_inference() for t in given)  # torch does not count the writes into those
        mark = (torch.is_inference_mode_enabled(), *((t.data_ptr(), version(t), tuple(t.shape)) for t in given))
        changed = uncounted or self._kept is None or self._kept[0] != mark or self._values.written
        if self.transport.size > 1:
            votes = torch.tensor([int(changed)])
            changed = bool(self.transport.all_reduce(votes, self._label("inputs"), "max").item())
        if changed:
            self._once.clear()
            self._values.forget()
            self._kept = mark, given

    def _halo_reduce(self, x: Tensor, slot: int, dim: int = 0, site: int = -1) -> Tensor:
        link = self._link(slot)
        coded = self._sites.get(site)
        if link is not None and coded is not None:
            return _along(dim, x, lambda rows: apply(CodedHaloReduce, rows, coded, self._pass))
        return x if link is None else _along(dim, x, lambda rows: apply(HaloReduce, rows, link))

    def _moved(self, x: Tensor, slot: int, dim: int = 0, site: int = -1) -> Tensor:
        if self.links[slot].plan.total == 0:
            return x
        return self._halo_exchange(x, slot, dim, site).index_select(dim, self._relayout[slot])

    def _halo_start(self, x: Tensor, slot: int, site: int) -> Any:
        crossing = self._turns.now.get(site)
        if crossing is None:  # no rank needs a row of another
            return x, x.new_empty((0, *x.shape[1:]))
        return apply(HaloStart, x.contiguous(), crossing)

    def _halo_wait(self, ticket: Tensor, slot: int, site: int) -> Tensor:
        crossing = self._turns.now.get(site)
        return ticket if crossing is None else cast(Tensor, apply(HaloWait, ticket, crossing))

    def _spmm_inner(
        self, own: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, rows: int, reduce: str, slot: int
    ) -> Tensor:
        return self.aggregations.inner(own, src, dst, weight, rows, reduce, self.links[slot].plan.halo)

    def _spmm_halo(
        self, partial: Tensor, halo: Tensor, src: Tensor, dst: Tensor, weight: Tensor | None, reduce: str, slot: int
    ) -> Tensor:
        return self.aggregations.outer(partial, halo, src, dst, weight, reduce, self.links[slot].plan.own)

    def _all_reduce(self, x: Tensor, op: str, shared: bool = False) -> Tensor:
        if op == "sum":
            return self._all_reduces([x], op, shared)[0]
        return self.transport.all_reduce(x.detach(), self._label("all_reduce"), op)  # type: ignore[arg-type]

    def _all_reduces(self, xs: list[Tensor], op: str, shared: bool = False) -> tuple[Tensor, ...]:
        assert op == "sum"
        if self.transport.size == 1:
            return tuple(xs)
        return cast("tuple[Tensor, ...]", apply(AllReduce, self.transport, self._label("all_reduce"), shared, *xs))

    def _replicated_output(self, x: Tensor) -> Tensor:
        return cast(Tensor, apply(ReplicatedOutput, x, self.transport.rank))

    def _sync_gradients(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        return cast("tuple[Tensor, ...]", apply(SyncGradients, self.transport, self._label("parameters"), *parameters))

    def _sync_finish(self, parameters: list[Tensor]) -> tuple[Tensor, ...]:
        self._reduction = Reduction(self.transport, self._courier, self._label("gradients"))
        return cast("tuple[Tensor, ...]", apply(SyncFinish, self._reduction, *parameters))

    def _sync_start(self, parameters: list[Tensor], positions: list[int]) -> tuple[Tensor, ...]:
        return cast("tuple[Tensor, ...]", apply(SyncStart, self._reduction, positions, *parameters))

    def _slice(
        self, x: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> Tensor:
        """Own rows where there are no others are all rows: a slice's gradient would be filled with zeros and copied first."""
        if not start and step == 1 and (end is None or end >= x.shape[dim]):
            return x
        return torch.ops.aten.slice.Tensor(x, dim, start, end, step)  # type: ignore[no-any-return]

    def _cat(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        """Own and halo rows joined; on one process, where there are no halo rows, without a copy of the own ones.

        Among several a rank without halo rows joins them all the same: through them it takes the gradients that come back.
        """
        own, *others = tensors
        alike = [t.dim() == own.dim() and t.dtype == own.dtype and t.shape[dim] == 0 for t in others]
        if self.transport.size == 1 and others and all(alike):
            return own
        return torch.ops.aten.cat.default(tensors, dim)  # type: ignore[no-any-return]

    def _row_dots(self, x: Tensor, vectors: list[Tensor]) -> Tensor:
        return row_dots(x, vectors)

    def _dropout(self, x: Tensor, keys: Tensor | None, p: float, site: int, dim: int = 0, relu: bool = False) -> Tensor:
        if keys is None:
            keys = torch.arange(x.shape[0] if x.dim() else 1, device=x.device)
        key = dropout_key(self.seed, self._draw, site)
        return keyed_dropout(x if x.dim() else x.view(1), keys, p, key, dim, relu).view(x.shape)


# Functions, and not the methods of each machine: a machine that refers to itself keeps its buffers until a collection.
_CALLS: dict[Any, Callable[..., Any]] = {
    ops.halo_exchange: Machine._halo_exchange,
    ops.halo_reduce: Machine._halo_reduce,
    ops.relayout: Machine._moved,
    ops.all_reduce: Machine._all_reduce,
    ops.all_reduces: Machine._all_reduces,
    ops.replicated_output: Machine._replicated_output,
    ops.sync_gradients: Machine._sync_gradients,
    ops.sync_finish: Machine._sync_finish,
    ops.sync_start: Machine._sync_start,
    ops.halo_start: Machine._halo_start,
    ops.halo_wait: Machine._halo_wait,
    ops.spmm_inner: Machine._spmm_inner,
    ops.spmm_halo: Machine._spmm_halo,
    ops.node_dropout: Machine._dropout,
    ops.row_dots: Machine._row_dots,
    torch.ops.aten.slice.Tensor: Machine._slice,
    torch.ops.aten.cat.default: Machine._cat,
}

_AMONG_RANKS = frozenset({ops.sync_gradients, ops.sync_finish, ops.sync_start, ops.replicated_output})
"""What changes gradients alone, and those where there are several ranks."""


def _member(module: nn.Module, path: str) -> Any:
    """A parameter or buffer by its path.

    Not through nn.Module's attribute lookup: while a rank in another thread captures, torch.export has replaced it.
    """
    value: Any = module
    for name in path.split("."):
        tables = (value.__dict__.get(table) or {} for table in ("_parameters", "_buffers", "_modules"))
        held = next((table for table in tables if name in table), None)
        value = getattr(value, name) if held is None else held[name]
    return value


def dropout_key(seed: int, draw: int, site: int) -> int:
    """The key of one dropout's mask: a mix of seed, draw, and call site."""
    key = seed & 0xFFFFFFFFFFFFFFFF
    for part in (draw, site):
        key = ((key ^ part) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
        key ^= key >> 29
    return key


def _along(dim: int, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    if dim == 0:
        return run(x.contiguous())
    return run(x.movedim(dim, 0).contiguous()).movedim(0, dim)


def _lookup(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg(value, lambda n: values[n])
