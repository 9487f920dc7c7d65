"""Matrix products over rows that were merged behind another dimension: done without the merge."""

from __future__ import annotations

import torch
from torch import fx

from sylvie_fx.ir.program import Program, is_tensor, shape
from sylvie_fx.passes.build import Builder, replace

aten = torch.ops.aten

RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})


def unmerge(program: Program) -> None:
    """Rewrite ``linear(x.view(A * N, d)).view(A, N, e)`` as ``linear(x.view(A, N, d))``.

    Merged, the rows of a rank would not lie side by side. It is how nn.MultiheadAttention projects its result.
    """
    for node in list(program.graph.nodes):
        if node.target in RESHAPES and _merges(program, node):
            _rewrite(node)


def _merges(program: Program, node: fx.Node) -> bool:
    source = node.args[0]
    if not is_tensor(source):
        return False
    before, after = shape(source), shape(node)  # type: ignore[arg-type]
    return (
        len(after) == 2
        and len(before) >= 3
        and before[0].is_Integer
        and before[0] != 1
        and program.space_of(before[1]) is not None
        and after[0] == before[0] * before[1]
    )


def _rewrite(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    lead = shape(source)[:2]
    products = list(node.users)
    views = [view for product in products for view in product.users]
    if not all(p.target is aten.linear.default and p.args[0] is node for p in products):
        return
    if not all(v.target in RESHAPES and len(shape(v)) == 3 and shape(v)[:2] == lead for v in views):
        return
    builder = Builder(node)
    first, rows = source.meta["val"].shape[:2]
    kept = builder.call(aten.sym_size.int, source, 1)
    val = node.meta["val"].new_empty((first, rows, node.meta["val"].shape[1]))
    apart = builder.call(aten.reshape.default, source, [first, kept, val.shape[2]], val=val)
    for product in products:
        result = product.meta["val"]
        new = Builder(product).call(
            aten.linear.default, apart, *product.args[1:], val=result.new_empty((first, rows, result.shape[1]))
        )
        for view in list(product.users):
            replace(view, new)
