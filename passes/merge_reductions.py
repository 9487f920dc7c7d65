"""Send sums over ranks that stand side by side in one message."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED
from sylvie_fx.ir.program import Program, meta, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, replace

#: Numbers of a sum that is worth merging: a larger one costs its bytes, not its latency.
MOST = 4096


@dataclass(frozen=True)
class MergeReductions(Pass):
    """Let sums over ranks that do not need each other be one message, as those of a loss and of its number of rows.

    Requires: global-reductions, sync-gradients.
    Ensures: the same bits, since each number is summed in the order of ranks as before.

    Before::

        total = sylvie.all_reduce(loss, sum)
        count = sylvie.all_reduce(rows, sum)

    After::

        merged = sylvie.all_reduces([loss, rows], sum)
        total, count = getitem(merged, 0), getitem(merged, 1)
    """

    name: ClassVar[str] = "merge-reductions"

    def run(self, program: Program, context: PassContext) -> Program:
        """Merge every run of sums of which none is read before the last one is formed."""
        run: list[fx.Node] = []
        for node in list(program.graph.nodes):
            if run and not set(run).isdisjoint(node.all_input_nodes):
                _merge(run)
                run = []
            if node.target is ops.all_reduce and node.args[1] == "sum" and _is_small(node):
                if run and run[0].args[1:] != node.args[1:]:
                    _merge(run)
                    run = []
                run.append(node)
        return program


def _is_small(node: fx.Node) -> bool:
    sizes = shape(node)
    return all(size.is_Integer for size in sizes) and math.prod(map(int, sizes)) <= MOST


def _merge(run: list[fx.Node]) -> None:
    if len(run) < 2:
        return
    build = Builder(run[-1])
    values = [node.args[0] for node in run]
    merged = build.call(ops.all_reduces, values, *run[0].args[1:], val=[n.meta["val"] for n in run], place=REPLICATED)
    for i, node in enumerate(run):
        item = build.call(operator.getitem, merged, i, val=node.meta["val"], place=REPLICATED)
        meta(item).where, meta(item).module = meta(node).where, meta(node).module
        replace(node, item)
