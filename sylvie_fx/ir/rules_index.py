"""Placement rules of reads and writes by index that do not cross rows: replicated tables, columns of a row.

Reads and writes of rows by edges or ids of the graph are rewritten before (passes/canonicalize.py); what is left here
with an index along the row dimension is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.rules import Call, Outcome, Refused, is_replicated, placement_rule, pointwise, same_rows, wrap

aten = torch.ops.aten

_PICKED = Refused(
    "it picks rows of the graph by an index that is no list of edges or node ids of the graph",
    "pick rows by edges or ids that are arguments of the model",
)


@placement_rule(aten.embedding)
def embedding(call: Call) -> Outcome:
    """A replicated table read by rows' own indices."""
    table, index = call.place(call.arg(0)), call.place(call.arg(1))
    if isinstance(table, Rows):
        raise Refused("a table with one row per node is read by an index computed from features",
                      "read it by node ids of the graph")  # fmt: skip
    return Outcome(index)


@placement_rule(aten.index_select)
def index_select(call: Call) -> Outcome:
    """One dimension read by a 1-D index: a replicated table by rows, or columns of rows by a replicated index."""
    source, index = call.arg(0), call.arg(2)
    dim = wrap(call.arg(1), len(call.shape(source)))
    table, by = call.place(source), call.place(index)
    if not isinstance(table, Rows):
        return Outcome(Rows(by.space, dim, by.factor) if isinstance(by, Rows) else REPLICATED)
    if table.dim == dim:
        raise _PICKED
    if isinstance(by, Rows):
        raise Refused("it reads a column of every row for every row (a dense rows-by-rows result)",
                      "read one column for each row with gather")  # fmt: skip
    return Outcome(table)


@placement_rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Outcome:
    """``table[i, j]`` with indices that broadcast together: rows of the indices, or rows of the table's other dimensions."""
    source, indices = call.arg(0), list(call.arg(1))
    table, rank = call.place(source), len(call.shape(source))
    if any(i is not None and i.meta["val"].dtype == torch.bool and len(call.shape(i)) > 1 for i in indices):
        raise Refused("a mask of several dimensions picks single entries", "use torch.where, or multiply by the mask")
    used = [d for d, i in enumerate(indices) if i is not None]
    width = max(len(call.shape(indices[d])) for d in used)
    adjacent = used == list(range(used[0], used[-1] + 1))
    start = used[0] if adjacent else 0
    found = []
    for d in used:
        place = call.place(indices[d])
        if isinstance(place, Rows):
            found.append(Rows(place.space, start + place.dim + width - len(call.shape(indices[d])), place.factor))
    if isinstance(table, Rows):
        if table.dim in used:
            raise _PICKED
        if found:
            raise Refused("it reads entries of every row for every row (a dense rows-by-rows result)",
                          "read one entry for each row with gather")  # fmt: skip
        before = sum(d < table.dim for d in range(rank) if d not in used)
        return Outcome(Rows(table.space, before + (width if start <= before else 0), table.factor))
    if not found:
        return Outcome(REPLICATED)
    same_rows(found)
    if len({p.dim for p in found}) > 1:
        raise Refused("it combines every row with every other row (a dense rows-by-rows result)",
                      "restrict it to the pairs that are edges of the graph")  # fmt: skip
    return Outcome(found[0])


@placement_rule(aten.index_put, aten.index_fill, aten.index_copy, aten.index_add)
def index_write(call: Call) -> Outcome:
    """Columns of every row written by a replicated index."""
    source = call.arg(0)
    table = call.place(source)
    if call.op is aten.index_put.default:
        used = [d for d, i in enumerate(call.arg(1)) if i is not None]
        given: list[Any] = [i for i in call.arg(1) if i is not None]
        value = call.arg(2)
    else:
        used, given, value = [wrap(call.arg(1), len(call.shape(source)))], [call.arg(2)], call.arg(3)
    if not call.sharded():
        return Outcome(REPLICATED)
    if not isinstance(table, Rows):
        raise Refused(
            "rows of the graph are written into a replicated tensor", "add them up with a scatter, or make it rows"
        )
    if table.dim in used or any(isinstance(call.place(i), Rows) for i in given):
        raise Refused(
            "rows of the graph are written by an index that depends on features",
            "write them by edges or ids of the graph",
        )
    place = call.place(value)
    if isinstance(place, Rows):
        same_rows([table, place])
        if call.op is aten.index_put.default or place.dim != table.dim:
            raise Refused(
                "rows are written into columns of rows by an index", "use torch.where, or torch.cat of the columns"
            )
    return Outcome(table)


@placement_rule(aten.gather, aten.take_along_dim)
def gather_columns(call: Call) -> Outcome:
    """``x.gather(dim, index)`` along another dimension than the rows'."""
    source, dim = call.arg(0), wrap(call.arg(1), len(call.out_shape))
    places = call.sharded()
    for node, place in places:
        if place.dim == dim:
            raise Refused(
                "it picks rows of the graph by an index computed from features", "pick them by edges of the graph"
            )
        if node is not source and is_replicated(call.place(source)):
            raise Refused("rows index a replicated tensor of the same length", "make both of them rows")
    return Outcome(pointwise(call).out if places else REPLICATED)


@placement_rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def scatter_columns(call: Call) -> Outcome:
    """``x.scatter(dim, index, src)`` along another dimension than the rows'."""
    dim = wrap(call.arg(1), len(call.out_shape))
    for _, place in call.sharded():
        if place.dim == dim:
            raise Refused(
                "it writes rows of the graph by an index computed from features", "write them by edges of the graph"
            )
    return pointwise(call)
