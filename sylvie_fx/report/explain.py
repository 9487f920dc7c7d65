"""explain(): the exchanges of a program as a table."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.coding import ExchangeCoding
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.pace import SYNCHRONOUS, Pace, Tier
from sylvie_fx.ir.program import Program, meta, shape


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange of a program.

    Attributes:
        name: Name of its node.
        kind: ``halo`` brings rows for a gather, ``reduce`` returns partial sums, ``relayout`` moves rows.
        value: The value that crosses.
        module: Path of the module that needs it.
        where: ``file:line`` of the user's code.
        columns: Numbers in a row.
        rows: Rows that this rank sends in the forward pass; None before data is bound.
        bytes: Payload bytes that this rank sends in a step, forward and backward; None before data is bound.
        coding: How the rows travel, forward and backward.
        pace: How old they may be.
        near: Both of rows to ranks of the same host, where a policy says that apart.
        why: Other values that could have crossed, and the bytes a row that they would cost.
    """

    name: str
    kind: str
    value: str
    module: str
    where: str
    columns: int
    rows: int | None
    bytes: int | None
    coding: ExchangeCoding
    pace: Pace
    near: Tier | None
    why: str


def exchange_rows(
    program: Program, bound: Any, options: Options, same_host: Sequence[bool] | None = None
) -> list[ExchangeRow]:
    """The exchanges of a program in order; those that move no row on this graph are left out once it is bound.

    Args:
        program: A rewritten program.
        bound: What the machine runs on, for numbers of rows and bytes; None to leave them out.
        options: The options of distribute().
        same_host: For each rank whether it runs on the host of this one; None for no rank.
    """
    rows = []
    kinds = {
        ops.halo_exchange: "halo", ops.halo_start: "halo", ops.halo_reduce: "reduce", ops.relayout: "relayout"
    }  # fmt: skip
    for node in program.graph.nodes:
        kind = kinds.get(node.target)
        if kind is None:
            continue
        plan = bound.plans[node.args[1]] if bound is not None else None
        if plan is not None and plan.total == 0:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        value = source.meta["val"]
        columns = math.prod(int(s) for s in shape(source) if not s.free_symbols)
        backward = program.mode == "train" and _needs_gradient(source)
        site = ops.exchange_site(node)
        coding = ExchangeCoding() if site is None else program.codings.get(site, ExchangeCoding())
        near = None if site is None else program.near.get(site)
        sent = total = None
        if plan is not None:
            ways = [[len(s) for s in plan.send_rows], plan.receive_counts]
            there, back = reversed(ways) if kind == "reduce" else ways
            sent, total = sum(there), 0
            for peer, (out, home) in enumerate(zip(there, back, strict=True)):
                used = near.coding if near is not None and same_host is not None and same_host[peer] else coding
                if not coding.once:
                    total += int(out * used.forward.row_bytes(columns, value.element_size()))
                    total += int(home * used.backward.row_bytes(columns, value.element_size())) if backward else 0
        others = ", ".join(f"{name} {cost:g}" for name, cost in meta(node).considered if name != source.name)
        rows.append(
            ExchangeRow(
                node.name,
                kind,
                source.name,
                meta(node).module,
                meta(node).where,
                columns,
                sent,
                total,
                coding,
                SYNCHRONOUS if site is None else program.paces.get(site, SYNCHRONOUS),
                near,
                others,
            )
        )
    return rows


def _needs_gradient(node: fx.Node) -> bool:
    """Whether a value depends on a parameter or on an input with gradient: then its backward crosses too."""
    seen, stack = set(), [node]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.target in (ops.sync_gradients, ops.sync_finish):
            return True
        stack += current.all_input_nodes
    return False


def _how(row: ExchangeRow) -> tuple[str, str]:
    """How rows travel, and how old they may be; in second lines the same within a host."""
    if row.near is None:
        return str(row.coding), str(row.pace)
    return f"{row.coding}\nwithin a host {row.near.coding}", f"{row.pace}\nwithin a host {row.near.pace}"


KernelOf: TypeAlias = Callable[[torch.dtype, torch.device], str]


def explain(
    program: Program,
    bound: Any,
    options: Options,
    kernel: KernelOf | None = None,
    same_host: Sequence[bool] | None = None,
    method: str = "forward",
) -> str:
    """The table of exchanges as text.

    Args:
        program: A rewritten program.
        bound: What the machine runs on, for numbers of rows and bytes; None to leave them out.
        options: The options of distribute().
        kernel: Names what an aggregation of values of a type on a device runs on.
        same_host: For each rank whether it runs on the host of this one; None for no rank.
        method: Of which method of the model the program is.
    """
    of = "" if method == "forward" else f" of {method}"
    table = Table(title=f"exchanges of the {program.mode} program{of}", title_justify="left")
    for name in (
        "exchange",
        "value",
        "module",
        "source",
        "numbers a row",
        "rows sent",
        "bytes a step",
        "coding",
        "staleness",
        "instead of (bytes a row)",
    ):
        table.add_column(
            name, justify="right" if name in ("numbers a row", "rows sent", "bytes a step") else "left", overflow="fold"
        )
    rows = exchange_rows(program, bound, options, same_host)
    for row in rows:
        where = row.where.rpartition("/")[2]
        counts = ["-" if n is None else f"{n:,}" for n in (row.rows, row.bytes)]
        table.add_row(row.kind, row.value, row.module, where, str(row.columns), *counts, *_how(row), row.why)
    total = sum(r.bytes or 0 for r in rows)
    reduces = sum(1 for n in program.graph.nodes if n.target in (ops.all_reduce, ops.all_reduces))
    table.caption = (f"{len(rows)} exchanges, about {total:,} bytes a step from this rank; "
                     f"{reduces} small all_reduce forward; "
                     "one all_reduce for the gradients of the parameters")  # fmt: skip
    buffer = io.StringIO()
    Console(file=buffer, width=160, no_color=True).print(table)
    return buffer.getvalue() + aggregation_text(program, kernel)


_AGGREGATIONS: dict[Any, str] = {
    ops.spmm: "sum or extreme of neighbours",
    ops.spmm_halo: "sum or extreme of neighbours, inner edges first",
    ops.attention: "attention",
    ops.segment_softmax: "softmax of edges",
    ops.sddmm: "products of the ends of edges",
    ops.edge_scores: "scores of edges",
    ops.scatter: "sum or extreme of messages",
}


def aggregation_text(program: Program, kernel: KernelOf | None = None) -> str:
    """A line for each aggregation: operator, source line, kernel, and for a scatter why it is not fused."""
    lines = []
    once = _computed_once(program)
    for node in program.graph.nodes:
        if node.target in _AGGREGATIONS:
            known, name = meta(node), str(node.target).removesuffix(".default")
            where = " at ".join(part for part in (known.module, known.where.rpartition("/")[2]) if part)
            state = f"not fused: {known.unfused}" if node.target is ops.scatter and known.unfused else "fused"
            often = ", once for the same inputs" if node in once else ""
            value = node.meta["val"]
            by = f", {kernel(value.dtype, value.device)}" if kernel is not None else ""
            lines.append(f"  {_AGGREGATIONS[node.target]}, {where}: {name}, {state}{by}{often}")
    return "".join(f"{line}\n" for line in ["aggregations:", *lines]) if lines else ""


def _computed_once(program: Program) -> set[fx.Node]:
    """Kept values and what only they are computed from."""
    found: set[fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if meta(node).kept or (node.users and all(user in found for user in node.users)):
            found.add(node)
    return found
