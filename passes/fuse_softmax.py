"""Fuse the parts of an edge softmax into one operator, recognised by its gathers and scatters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, is_tensor, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta, replace

aten = torch.ops.aten


@dataclass(frozen=True)
class FuseSoftmax(Pass):
    """Replace exp(e - max) / sum, with maxima and sums over the edges of each row, by ``sylvie.segment_softmax``.

    The maximum may be detached or not (the softmax does not depend on it), or left out; a constant may be added to the
    sum, before or behind the gather, where it is lost in rounding: with the maximum taken off, a sum is at least one.

    Requires: insert-halo.
    Ensures: a softmax over the rows of one index, all of them on this rank, is one operator with a safe exponential.

    Before::

        m = sylvie.scatter(e, dst, rows_0, amax, 0)
        g = sylvie.gather(m, dst, 0)
        sub = aten.sub(e, g)
        exp = aten.exp(sub)
        s = sylvie.scatter(exp, dst, rows_0, sum, 0)
        t = sylvie.gather(s, dst, 0)
        out = aten.div(exp, t)

    After::

        out = sylvie.segment_softmax(e, dst, rows_0)
    """

    name: ClassVar[str] = "fuse-softmax"

    def run(self, program: Program, context: PassContext) -> Program:
        """Fuse each quotient that matches."""
        for node in list(program.graph.nodes):
            found = _softmax(node) if node.target is aten.div.Tensor else None
            if found is None:
                continue
            scores, index, rows = found
            new = Builder(node).call(ops.segment_softmax, scores, index, rows, val=node.meta["val"])
            copy_meta(node, new)
            replace(node, new)
        program.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or n.target not in _ERASABLE)
        return program


_ERASABLE = frozenset(
    {
        ops.gather, ops.scatter, aten.exp.default, aten.sub.Tensor, aten.add.Tensor, aten.detach.default,
        aten.clamp.default, aten.clamp_min.default,
    }
)  # fmt: skip


def _softmax(quotient: fx.Node) -> tuple[fx.Node, fx.Node, Any] | None:
    """The scores, the index and the number of rows of a softmax that ends in this quotient."""
    if len(quotient.args) != 2 or quotient.kwargs:
        return None
    powers, divisor = quotient.args
    if not (isinstance(powers, fx.Node) and powers.target is aten.exp.default):
        return None
    divisor, constant = _without_constant(divisor)
    found = _gathered(divisor)
    if found is None:
        return None
    total, index = found
    total, more = _without_constant(total)
    constant += more
    if not (isinstance(total, fx.Node) and total.target is ops.scatter):
        return None
    summed, into, rows, reduce, dim = total.args
    if summed is not powers or into is not index or reduce != "sum" or dim != 0 or shape(powers) != shape(quotient):
        return None
    shifted = _shifted(powers.args[0], index, rows)
    safe, scores = shifted is not None, shifted or powers.args[0]
    if not isinstance(scores, fx.Node) or not is_tensor(scores):
        return None
    if shape(scores) != shape(quotient) or placement(scores) != placement(quotient):
        return None
    dtype = scores.meta["val"].dtype
    if not dtype.is_floating_point or dtype != quotient.meta["val"].dtype:
        return None
    if constant and not (safe and float(torch.tensor(1.0, dtype=dtype) + constant) == 1.0):
        return None
    return scores, index, rows


def _gathered(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The value and the index of a gather of rows."""
    if isinstance(node, fx.Node) and node.target is ops.gather and (*node.args, 0)[2] == 0:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None


def _without_constant(node: Any) -> tuple[Any, float]:
    """A value, and the non-negative number that is added to it (or below which it is not let fall)."""
    if isinstance(node, fx.Node) and not node.kwargs and len(node.args) == 2:
        value, number = node.args
        known = (aten.add.Tensor, aten.clamp_min.default, aten.clamp.default)
        if node.target in known and isinstance(number, (int, float)) and 0 <= number < 1:
            return value, float(number)
    return node, 0.0


def _shifted(node: Any, index: fx.Node, rows: Any) -> fx.Node | None:
    """The scores of which the maxima of their rows are taken off; None where that is not so."""
    if not (isinstance(node, fx.Node) and node.target is aten.sub.Tensor and len(node.args) == 2 and not node.kwargs):
        return None
    scores, found = node.args[0], _gathered(node.args[1])
    if found is None or found[1] is not index:
        return None
    largest = _attached(found[0])
    if not (isinstance(largest, fx.Node) and largest.target is ops.scatter):
        return None
    reduced, into, size, reduce, dim = largest.args
    same = _attached(reduced) is _attached(scores) and into is index and size is rows
    return scores if same and reduce == "amax" and dim == 0 else None  # type: ignore[return-value]


def _attached(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is aten.detach.default:
        node = node.args[0]
    return node
