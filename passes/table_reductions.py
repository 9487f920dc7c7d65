"""Rows of all ranks scattered into a table of fixed length, such as one row for each graph of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.passes.base import refuse
from sylvie_fx.passes.rewrite import Rewrite, neutral_value

aten = torch.ops.aten


def table(b: Rewrite) -> fx.Node:
    """Rows of all ranks scattered into a table of fixed length, such as one row for each graph of a batch."""
    source, index, rows, reduce, dim = b.node.args
    assert isinstance(source, fx.Node)
    assert isinstance(dim, int)

    def added(value: fx.Node) -> fx.Node:
        return b.total(b.local(ops.scatter, value, index, rows, "sum", dim, val=_table_of(value, rows, dim)))

    if reduce == "sum":
        return added(source)
    val = source.meta["val"]
    ones = b.local(aten.full_like.default, source, 1.0 if val.dtype.is_floating_point else 1, place=b.like(source))
    if reduce == "mean":
        return b.local(aten.div.Tensor, added(source), b.local(aten.clamp_min.default, added(ones), 1))
    if reduce not in ("amax", "amin"):
        raise refuse(b.node, f"rows of all ranks are multiplied up in a table (reduce={reduce!r})", "it has no exact form over ranks yet",
                     "use sum, mean, amax or amin")  # fmt: skip
    bound = _table_bound(b, source, index, rows, dim, largest=reduce == "amax")
    written = b.local(aten.gt.Scalar, added(ones), 0)
    if val.dtype.is_floating_point:
        picked = b.local(aten.index_select.default, bound, dim, index, place=b.like(source), val=val)
        hit = b.local(aten.eq.Tensor, source, picked, place=b.like(source))
        hits = added(b.local(aten._to_copy.default, hit, dtype=val.dtype, place=b.like(source)))
        counts = b.local(aten.clamp_min.default, hits, 1)  # an empty row has no gradient rather than a NaN
        bound = b.local(
            aten.div.Tensor, added(b.local(aten.where.ScalarOther, hit, source, 0.0, place=b.like(source))), counts
        )
    return b.local(aten.where.ScalarOther, written, bound, 0)


def _table_of(value: fx.Node, rows: Any, dim: int) -> Any:
    sizes = list(value.meta["val"].shape)
    sizes[dim] = rows
    return value.meta["val"].new_empty(sizes)


def _table_bound(b: Rewrite, source: fx.Node, index: Any, rows: Any, dim: int, *, largest: bool) -> fx.Node:
    """The extreme value in each row of the table, without gradient; an infinity where nothing is written."""
    val = _table_of(source, rows, dim)
    detached = b.local(aten.detach.default, source, place=b.like(source))
    neutral = neutral_value(val.dtype, largest=largest)
    base = b.local(aten.full.default, list(val.shape), neutral, dtype=val.dtype, device=val.device, val=val)
    shaped = b.local(
        aten.view.default, index, [-1 if d == dim else 1 for d in range(len(val.shape))], place=b.like(source)
    )
    wide = b.local(aten.expand_as.default, shaped, detached, place=b.like(source))
    local = b.local(aten.scatter_reduce.two, base, dim, wide, detached, "amax" if largest else "amin", val=val)
    return b.total(local, "max" if largest else "min")
