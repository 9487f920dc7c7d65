"""Reductions, normalisations and losses over rows of all ranks: a local part and an all_reduce, with the right gradient."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.program import Program, meta, shape
from sylvie_fx.ir.rules_math import CLASS_LOSSES, ELEMENTWISE_LOSSES, reduced_dims, reduction_keeps
from sylvie_fx.passes.base import Pass, PassContext, refuse
from sylvie_fx.passes.build import replace
from sylvie_fx.passes.rewrite import Rewrite, neutral_value
from sylvie_fx.passes.table_reductions import table

aten = torch.ops.aten


@dataclass(frozen=True)
class GlobalReductions(Pass):
    """Rewrite every operator that combines rows of different ranks into local operators and all_reduce.

    Requires: infer-placement.
    Ensures: no operator but those of ``sylvie::`` combines rows of different ranks. Gradients follow one rule: every
    rank's autograd holds a term, and the sum of the terms over the ranks is the gradient.

    Before::

        m = aten.mean.dim(x, [0])          # rows[N] -> replicated

    After::

        s = aten.sum.dim_IntList(x, [0])
        a = sylvie.all_reduce(s, sum)
        m = aten.div(a, N)
    """

    name: ClassVar[str] = "global-reductions"

    def run(self, program: Program, context: PassContext) -> Program:
        """Rewrite each operator that crosses."""
        for node in list(program.graph.nodes):
            if meta(node).crosses:
                _rewrite(program, node)
        return program


def _rewrite(program: Program, node: fx.Node) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = node.target.overloadpacket
    rule = _REWRITES.get(packet)
    if rule is None:
        raise refuse(node, f"{node.target} combines rows of all ranks", "there is no exact form of it over ranks yet",
                     "write it with sum, mean, amax, softmax or logsumexp")  # fmt: skip
    new = rule(Rewrite(program, node))
    if isinstance(node.meta["val"], (tuple, list)):
        for user in list(node.users):  # of max and min only the values are read, see the placement rule
            replace(user, new[user.args[1]] if isinstance(new, tuple) else new)  # type: ignore[index]
        node.graph.erase_node(node)
    else:
        assert isinstance(new, fx.Node)
        meta(new).placement = meta(node).placement
        replace(node, new)


def _dims(b: Rewrite) -> tuple[fx.Node, list[int], bool]:
    source = b.invocation.arg(0)
    return source, reduced_dims(b.invocation, len(shape(source))), reduction_keeps(b.invocation)


def _dtype(b: Rewrite) -> dict[str, Any]:
    dtype = b.node.kwargs.get("dtype")
    return {} if dtype is None else {"dtype": dtype}


def _sum(b: Rewrite) -> fx.Node:
    source, dims, keep = _dims(b)
    return b.sum_over(source, dims, keep=keep, **_dtype(b))


def _mean(b: Rewrite) -> fx.Node:
    source, dims, keep = _dims(b)
    return b.local(aten.div.Tensor, b.sum_over(source, dims, keep=keep, **_dtype(b)), b.entries(source, dims))


def _extreme(largest: bool) -> Callable[[Rewrite], fx.Node]:
    def rewrite(b: Rewrite) -> fx.Node:
        source, dims, keep = _dims(b)
        return extreme(b, source, dims, keep=keep, largest=largest)

    return rewrite


def extreme(b: Rewrite, source: fx.Node, dims: list[int], *, keep: bool, largest: bool) -> fx.Node:
    """Maximum or minimum over dimensions, rows of all ranks among them; the gradient is shared evenly by ties."""
    bound = bound_over(b, source, dims, largest=largest)
    val = source.meta["val"]
    if not val.dtype.is_floating_point:
        return bound if keep else b.local(aten.squeeze.dims, bound, dims)
    hit = b.local(aten.eq.Tensor, source, bound, place=b.like(source))
    counts = b.sum_over(b.local(aten._to_copy.default, hit, dtype=val.dtype, place=b.like(source)), dims, keep=keep)
    picked = b.local(aten.mul.Tensor, source, hit, place=b.like(source))
    safe = b.local(aten.where.ScalarOther, hit, picked, 0.0, place=b.like(source))
    return b.local(aten.div.Tensor, b.sum_over(safe, dims, keep=keep), counts)


def bound_over(b: Rewrite, source: fx.Node, dims: list[int], *, largest: bool) -> fx.Node:
    """The extreme value without gradient, kept dimensions; a rank without rows contributes the neutral value."""
    detached = b.local(aten.detach.default, source, place=b.like(source))
    val = source.meta["val"]
    neutral = neutral_value(val.dtype, largest=largest)
    place = b.like(source)
    assert isinstance(place, Rows)
    size = [1 if d == place.dim else int(s) for d, s in enumerate(shape(source))]
    extra = b.local(aten.full.default, size, neutral, dtype=val.dtype, device=val.device)
    padded = b.local(aten.cat.default, [detached, extra], place.dim)
    local = b.local(aten.amax.default if largest else aten.amin.default, padded, dims, True)
    return b.total(local, "max" if largest else "min")


def _variance(root: bool, *, mean_too: bool = False) -> Callable[[Rewrite], Any]:
    def rewrite(b: Rewrite) -> Any:
        source, dims, keep = _dims(b)
        correction: Any = b.node.kwargs.get("correction", 1)
        if any(a.name == "unbiased" for a in b.node.target._schema.arguments):  # type: ignore[union-attr]
            correction = int(bool(b.invocation.named("unbiased")))
        correction = 1 if correction is None else int(correction)
        count = b.entries(source, dims)
        mean = b.local(aten.div.Tensor, b.sum_over(source, dims, keep=True), count)
        centred = b.local(aten.sub.Tensor, source, mean, place=b.like(source))
        squares = b.sum_over(b.local(aten.mul.Tensor, centred, centred, place=b.like(source)), dims, keep=keep)
        if isinstance(count, fx.Node):
            with b.graph.inserting_before(b.before):
                degrees: Any = b.graph.call_function(operator.sub, (count, correction))
            degrees.meta["val"] = count.meta["val"] - correction
            meta(degrees).placement = REPLICATED
        else:
            degrees = count - correction
        result = b.local(aten.div.Tensor, squares, degrees)
        result = _root(b, result, 0.5) if root else result
        if not mean_too:
            return result
        return result, mean if keep else b.local(aten.squeeze.dims, mean, dims)

    return rewrite


def _norm(b: Rewrite) -> fx.Node:
    source, dims, keep = _dims(b)
    vector = b.node.target is aten.linalg_vector_norm.default
    p = (
        b.invocation.named("ord")
        if vector
        else (b.invocation.named("p") if b.node.target is not aten.frobenius_norm.dim else 2)
    )
    p = 2.0 if p is None else float(p)
    absolute = b.local(aten.abs.default, source, place=b.like(source))
    if math.isinf(p):
        return extreme(b, absolute, dims, keep=keep, largest=p > 0)
    if p == 0.0:
        counted = b.local(aten.ne.Scalar, source, 0, place=b.like(source))
        return b.sum_over(
            b.local(aten._to_copy.default, counted, dtype=absolute.meta["val"].dtype, place=b.like(source)),
            dims,
            keep=keep,
        )
    powered = b.local(aten.pow.Tensor_Scalar, absolute, p, place=b.like(source))
    total = b.sum_over(powered, dims, keep=keep)
    return _root(b, total, 1.0 / p)


def _root(b: Rewrite, total: fx.Node, exponent: float) -> fx.Node:
    """A norm or deviation of its sum of powers; the gradient of that of zeros is zero, where a root's is infinite."""
    nothing = b.local(aten.eq.Scalar, total, 0)
    root = b.local(aten.pow.Tensor_Scalar, b.local(aten.masked_fill.Scalar, total, nothing, 1.0), exponent)
    return b.local(aten.masked_fill.Scalar, root, nothing, 0.0)


def _logsumexp(b: Rewrite) -> fx.Node:
    source, dims, keep = _dims(b)
    bound = bound_over(b, source, dims, largest=True)
    shifted = b.local(
        aten.exp.default, b.local(aten.sub.Tensor, source, bound, place=b.like(source)), place=b.like(source)
    )
    total = b.local(aten.log.default, b.sum_over(shifted, dims, keep=keep))
    return b.local(aten.add.Tensor, total, bound if keep else b.local(aten.squeeze.dims, bound, dims))


def _truth(b: Rewrite) -> fx.Node:
    source, dims, keep = _dims(b)
    every = b.node.target.overloadpacket is aten.all  # type: ignore[union-attr]
    flags = b.local(aten.eq.Scalar if every else aten.ne.Scalar, source, 0, place=b.like(source))
    count = b.sum_over(b.local(aten._to_copy.default, flags, dtype=torch.int64, place=b.like(source)), dims, keep=keep)
    return b.local(aten.eq.Scalar if every else aten.ne.Scalar, count, 0)


def _count_nonzero(b: Rewrite) -> fx.Node:
    source, dims, keep = _dims(b)
    flags = b.local(aten.ne.Scalar, source, 0, place=b.like(source))
    return b.sum_over(b.local(aten._to_copy.default, flags, dtype=torch.int64, place=b.like(source)), dims, keep=keep)


def _softmax(log: bool) -> Callable[[Rewrite], fx.Node]:
    def rewrite(b: Rewrite) -> fx.Node:
        source = b.invocation.arg(0)
        place = b.like(source)
        assert isinstance(place, Rows)
        bound = bound_over(b, source, [place.dim], largest=True)
        shifted = b.local(aten.sub.Tensor, source, bound, place=place)
        exponent = b.local(aten.exp.default, shifted, place=place)
        total = b.sum_over(exponent, [place.dim], keep=True)
        if log:
            return b.local(aten.sub.Tensor, shifted, b.local(aten.log.default, total), place=place)
        return b.local(aten.div.Tensor, exponent, total, place=place)

    return rewrite


def _product(b: Rewrite) -> fx.Node:
    keywords: dict[str, Any] = dict(b.node.kwargs)
    return b.total(b.local(b.node.target, *b.node.args, **keywords))


def _batch_norm(b: Rewrite) -> fx.Node:
    source, weight, bias, *buffers = (b.invocation.arg(i) for i in range(5))
    dims = [d for d in range(len(shape(source))) if d != 1]
    return _standardise(b, source, dims, weight, bias, buffers, b.invocation.arg(6), b.invocation.arg(7))


def _instance_norm(b: Rewrite) -> fx.Node:
    source, weight, bias, *buffers = (b.invocation.arg(i) for i in range(5))
    if buffers[0] is not None and shape(source)[0] != 1:
        raise refuse(b.node, "instance norm keeps running statistics of several samples", "they have no exact form over ranks yet",
                     "set track_running_stats=False")  # fmt: skip
    dims = list(range(2, len(shape(source))))
    return _standardise(b, source, dims, weight, bias, buffers, b.invocation.arg(6), b.invocation.arg(7))


def _standardise(b: Rewrite, source: fx.Node, dims: list[int], weight: Any, bias: Any, buffers: list[Any], momentum: Any,
                 eps: Any) -> fx.Node:  # fmt: skip
    """Subtract the mean over ``dims`` of all ranks and divide by the deviation; channels are dimension 1."""
    place, view = b.like(source), [1, int(shape(source)[1]), *[1] * (len(shape(source)) - 2)]
    count = b.entries(source, dims)
    mean = b.local(aten.div.Tensor, b.sum_over(source, dims, keep=True), count)
    centred = b.local(aten.sub.Tensor, source, mean, place=place)
    squares = b.sum_over(b.local(aten.mul.Tensor, centred, centred, place=place), dims, keep=True)
    variance = b.local(aten.div.Tensor, squares, count)
    if buffers[0] is not None:
        flat = [b.local(aten.view.default, v, [view[1]]) for v in (mean, variance)]
        b.local(ops.update_running, *buffers, *flat, count, momentum, val=())
    scale = b.local(aten.rsqrt.default, b.local(aten.add.Scalar, variance, eps))
    result = b.local(aten.mul.Tensor, centred, scale, place=place)
    if weight is not None:
        result = b.local(aten.mul.Tensor, result, b.local(aten.view.default, weight, view), place=place)
    if bias is not None:
        result = b.local(aten.add.Tensor, result, b.local(aten.view.default, bias, view), place=place)
    return result


def _loss_sum(b: Rewrite) -> fx.Node:
    """The loss with reduction='sum', over all ranks."""
    arguments = b.node.target._schema.arguments  # type: ignore[union-attr]
    values = {a.name: b.invocation.arg(i) for i, a in enumerate(arguments)}
    values["reduction"] = 2
    positional = [values[a.name] for a in arguments if not a.kwarg_only]
    keyword = {a.name: values[a.name] for a in arguments if a.kwarg_only}
    return b.total(b.local(b.node.target, *positional, **keyword))


def _elementwise_loss(b: Rewrite) -> fx.Node:
    total = _loss_sum(b)
    if b.invocation.named("reduction") == 2:
        return total
    source = b.invocation.arg(0)
    return b.local(aten.div.Tensor, total, b.entries(source, list(range(len(shape(source))))))


def _class_loss(b: Rewrite) -> fx.Node:
    total = _loss_sum(b)
    if b.invocation.named("reduction") == 2:
        return total
    target, weight, ignored = b.invocation.arg(1), b.invocation.named("weight"), b.invocation.named("ignore_index")
    if target.meta["val"].dtype.is_floating_point:
        size = b.entries(target, [d for d in range(len(shape(target))) if d != 1 or len(shape(target)) == 1])
        return b.local(aten.div.Tensor, total, size)
    place, dims = b.like(target), list(range(len(shape(target))))
    valid = b.local(aten.ne.Scalar, target, ignored, place=place)
    share = b.local(aten._to_copy.default, valid, dtype=total.meta["val"].dtype, place=place)
    if weight is not None:
        known = b.local(aten.where.ScalarOther, valid, target, 0, place=place)
        of_row = b.local(aten.index.Tensor, weight, [known], place=place)
        share = b.local(aten.mul.Tensor, share, of_row, place=place)
    return b.local(aten.div.Tensor, total, b.sum_over(share, dims, keep=False))


_REWRITES: dict[Any, Callable[[Rewrite], Any]] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.amax: _extreme(True),
    aten.amin: _extreme(False),
    aten.max: _extreme(True),
    aten.min: _extreme(False),
    aten.var: _variance(False),
    aten.std: _variance(True),
    aten.var_mean: _variance(False, mean_too=True),
    aten.std_mean: _variance(True, mean_too=True),
    aten.norm: _norm,
    aten.linalg_vector_norm: _norm,
    aten.frobenius_norm: _norm,
    aten.logsumexp: _logsumexp,
    aten.any: _truth,
    aten.all: _truth,
    aten.count_nonzero: _count_nonzero,
    aten.softmax: _softmax(False),
    aten._softmax: _softmax(False),
    aten.log_softmax: _softmax(True),
    aten._log_softmax: _softmax(True),
    aten.mm: _product,
    aten.matmul: _product,
    aten.bmm: _product,
    aten.mv: _product,
    aten.dot: _product,
    aten.vdot: _product,
    aten.einsum: _product,
    aten.batch_norm: _batch_norm,
    aten.instance_norm: _instance_norm,
    torch.ops.sylvie.scatter: table,
    **dict.fromkeys(ELEMENTWISE_LOSSES, _elementwise_loss),
    **dict.fromkeys(CLASS_LOSSES, _class_loss),
}
