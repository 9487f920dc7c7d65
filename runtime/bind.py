"""From a program and a graph to what one rank runs on: prologue results, layouts, local indices and exchange plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from sylvie_fx.graphs.layout import ExchangePlan, RowLayout, exchange_plan
from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.placement import NODES, Rows
from sylvie_fx.ir.program import Localized, Program
from sylvie_fx.ir.rules import expression


@dataclass(frozen=True, eq=False)
class Bound:
    """What a machine needs besides the program.

    Attributes:
        values: Main placeholder name to its tensor or number on this rank.
        plans: Slot number to this rank's exchange plan.
        layouts: ``(component, space)`` to the layout of its rows.
        rank: This rank.
    """

    values: dict[str, Any]
    plans: dict[int, ExchangePlan]
    layouts: dict[tuple[int, str], RowLayout]
    rank: int


class Binder:
    """Evaluates a program's prologue and layouts on the whole graph, once for all ranks.

    Args:
        program: The rewritten program.
        whole: Static inputs of the program by name, on the whole graph.
        entries: Row space name to the layout in which it enters the program.
    """

    def __init__(self, program: Program, whole: Mapping[str, Tensor], entries: Mapping[str, RowLayout]) -> None:
        self.program, self.entries = program, entries
        self.parts = entries[NODES].parts
        assert program.prologue is not None
        self.results = run_prologue(program.prologue, whole)
        self._layouts: dict[tuple[int, str], RowLayout] = {}

    def layout(self, component: int, space: str) -> RowLayout:
        """The layout of a component's rows."""
        key = (component, space)
        if key not in self._layouts:
            self._layouts[key] = self.entries[space] if component == 0 else self._evaluate(component)
        return self._layouts[key]

    def _evaluate(self, component: int) -> RowLayout:
        layout = self.program.components[component].layout
        if layout.kind == "by":
            assert layout.index is not None
            assert layout.target is not None
            target = self.layout(layout.target, layout.target_space)
            return RowLayout(target.owner[self.results[layout.index]], self.parts)
        if layout.kind == "concat":
            return RowLayout(torch.cat([self.layout(*part).owner for part in layout.parts]), self.parts)
        if layout.kind == "slice":
            whole = self.layout(*layout.parts[0])
            lengths = [self.size(space) for _, space in layout.parts[1:]]
            start = sum(lengths[: layout.position])
            return RowLayout(whole.owner[start : start + lengths[layout.position]], self.parts)
        rows = self.size(self.program.components[component].space)
        return RowLayout(torch.arange(rows) * self.parts // max(rows, 1), self.parts)

    def size(self, space: str) -> int:
        """Global number of rows of a space."""
        if space in self.entries:
            return len(self.entries[space].owner)
        size = self.program.sizes[space].subs(self._symbols)
        if size.is_Integer:
            return int(size)
        raise VerifyError(f"nothing tells the size of {space}")

    @cached_property
    def _symbols(self) -> dict[sympy.Expr, int]:
        """The value of every size symbol that a result of the prologue shows."""
        known = {
            self.program.sizes[space]: len(layout.owner)
            for space, layout in self.entries.items()
            if space in self.program.sizes
        }
        assert self.program.prologue is not None
        output = next(n for n in self.program.prologue.graph.nodes if n.op == "output")
        for node in output.args[0]:
            val, result = node.meta["val"], self.results[node.name]
            sizes = zip(val.shape, result.shape, strict=True) if isinstance(val, Tensor) else [(val, result)]
            for size, actual in sizes:
                rest = expression(size).subs(known)
                if len(rest.free_symbols) == 1 and rest.is_polynomial() and sympy.degree(rest) == 1:
                    (symbol,) = rest.free_symbols
                    known[symbol] = int(sympy.solve(rest - int(actual), symbol)[0])
        return known

    def plan(self, slot: int, rank: int) -> ExchangePlan:
        """The exchange plan of a slot on one rank."""
        known = self.program.slots[slot]
        index = None if known.index is None else self.results[known.index]
        return exchange_plan(self.layout(*known.source), self.layout(*known.target), index, rank)

    def for_rank(self, rank: int, device: torch.device | None = None) -> Bound:
        """Everything that one rank's machine reads."""
        plans = {s.number: self.plan(s.number, rank) for s in self.program.slots}
        values: dict[str, Any] = {}
        for name, bound in self.program.localized.items():
            values[name] = self._localize(bound, rank, plans)
        for name, (component, space) in self.program.counts.items():
            if component < 0:
                plan = plans[-1 - component]
                values[name] = plan.own + plan.halo
            else:
                values[name] = self.layout(component, space).counts[rank]
        for name, (component, space) in self.program.row_ids.items():
            if component < 0:
                values[name] = self._with_halo(-1 - component, rank, plans)
            else:
                values[name] = self.layout(component, space).rows(rank)
        for name, value in self.program.numbers.items():
            number = self.results[value]
            values[name] = number if isinstance(number, float) else int(number)
        if device is not None:
            values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return Bound(values, plans, self._layouts, rank)

    def _with_halo(self, slot: int, rank: int, plans: Mapping[int, ExchangePlan]) -> Tensor:
        """Global indices of a rank's own rows and of the halo rows that a slot brings."""
        return torch.cat([self.layout(*self.program.slots[slot].source).rows(rank), plans[slot].halo_ids])

    def _localize(self, bound: Localized, rank: int, plans: Mapping[int, ExchangePlan]) -> Any:
        value = self.results[bound.value]
        if not isinstance(bound.placement, Rows):
            return value
        if bound.slot is not None:
            return plans[bound.slot].local_index
        assert bound.placement.component is not None
        if bound.halo is not None:
            return value.index_select(bound.placement.dim, self._with_halo(bound.halo, rank, plans))
        rows = self.layout(bound.placement.component, bound.placement.space).rows(rank)
        own = value.index_select(bound.placement.dim, rows)
        if bound.index_into is None:
            return own
        return self.layout(bound.index_into, bound.index_space).position[own]


def run_prologue(prologue: fx.GraphModule, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """Run a prologue on the whole graph.

    Args:
        prologue: The graph-only program.
        whole: Its inputs by name.

    Returns:
        Results by name.

    Raises:
        BranchError: The capture decided a Python branch otherwise than this graph does.
    """
    output = next(n for n in prologue.graph.nodes if n.op == "output")
    names = [n.name for n in output.args[0]]
    inputs = [whole[n.name] for n in prologue.graph.nodes if n.op == "placeholder"]
    interpreter = fx.Interpreter(prologue, garbage_collect_values=True)
    interpreter.extra_traceback = False  # it would rewrite the text of an error
    with torch.no_grad():
        results = interpreter.run(*inputs)
    return dict(zip(names, results, strict=True))
