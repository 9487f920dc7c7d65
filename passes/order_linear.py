"""Choose on which side of an aggregation a linear layer stands: A(XW) or (AX)W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import Program, is_tensor, meta, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta
from sylvie_fx.passes.dependence import depends_on_inputs_alone, needs_gradient

aten = torch.ops.aten


@dataclass(frozen=True)
class OrderLinear(Pass):
    """Move linear layers to the side of aggregations where fewer columns are aggregated and cross ranks.

    A sum or mean of neighbours, a scaling of rows and sums of such act on every column alike, so they commute with a
    linear layer: ``A(XW) = (AX)W``. Both cost the same products; what is aggregated, forward and backward, and sent,
    has as many columns as the layer's input or as its output. A value that depends on inputs without gradient is
    aggregated once and for all (keep-aggregations), so that its columns cost nothing. A bias stays behind the
    aggregation, and one that is added to a layer's result becomes part of the layer.

    Requires: insert-halo, fuse-aggregation; place-halos comes after it.
    Ensures: the same results up to rounding; on each moved layer's way fewer columns are aggregated in a step.

    Before::

        h = aten.linear(x, weight)
        halo = sylvie.halo_exchange(h, 0)
        out = sylvie.spmm(halo, src, dst, None, rows_0, sum)

    After::

        halo = sylvie.halo_exchange(x, 0)
        agg = sylvie.spmm(halo, src, dst, None, rows_0, sum)
        out = aten.linear(agg, weight)
    """

    name: ClassVar[str] = "order-linear"
    keeps: bool = True  # whether keep-aggregations runs too

    def run(self, program: Program, context: PassContext) -> Program:
        """Decide for each linear layer that stands beside aggregations."""
        for node in list(program.graph.nodes):
            if _is_product(node):
                self._behind(program, node)
        for node in list(program.graph.nodes):
            if _is_product(node):
                self._in_front(program, node, context)
        for node in list(program.graph.nodes):
            if node.target is aten.add.Tensor:
                _join_bias(node)
        program.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output") or n.target not in _ERASABLE)
        return program

    def _columns(self, program: Program, value: fx.Node, columns: int) -> int:
        """Columns that are aggregated in a step, forward and backward."""
        forward = 0 if self.keeps and depends_on_inputs_alone(program, value) else columns
        backward = columns if program.mode == "train" and needs_gradient(program, value) else 0
        return forward + backward

    def _behind(self, program: Program, linear: fx.Node) -> None:
        """Move a linear layer without bias from in front of aggregations to behind them, where that is cheaper."""
        x, _, bias = _parts(linear)
        if bias is not None or self._columns(program, x, _width(x)) >= self._columns(program, linear, _width(linear)):
            return
        tree = _reach(linear)
        ends = [n for n in tree if _read_outside(n, set(tree))]
        # With several ends the layer would be computed several times; if it is one itself, it stays needed where it is.
        if len(ends) != 1 or ends[0] is linear or not any(n.target is ops.spmm for n in tree):
            return
        end = ends[0]
        moved = {linear: x}
        for node in tree[1:]:
            moved[node] = _again(node, moved, end)
        _replace(end, _applied(linear, moved[end], end))

    def _in_front(self, program: Program, linear: fx.Node, context: PassContext) -> None:
        """Move a linear layer from behind aggregations to in front of them, where that is cheaper."""
        if not context.options.pace(program.mode, meta(linear).module).synchronous:
            return  # old rows times old weights: the training loop has a longer delay, and may oscillate
        top, _, bias = _parts(linear)
        if _width(linear) >= _width(top):
            return
        found = _sources(top)
        if found is None:
            return
        leaf, tree = found
        if any(_read_outside(node, {*tree, linear}) for node in tree):
            return  # it is needed as it is, too
        if self._columns(program, leaf, _width(top)) <= self._columns(program, linear, _width(linear)):
            return
        moved = {leaf: _applied(linear, leaf, linear)}
        for node in tree:
            moved[node] = _again(node, moved, linear)
        new = moved[top]
        if bias is not None:
            new = Builder(linear).call(aten.add.Tensor, new, bias, val=linear.meta["val"])
        _replace(linear, new)


def _join_bias(total: fx.Node) -> None:
    """Let a product take the bias that is added to it, which saves a sweep over the rows and their gradient."""
    if len(total.args) != 2 or total.kwargs or len(shape(total)) != 2:
        return
    for product, bias in (total.args, total.args[::-1]):
        if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node) and _is_product(product)):
            continue
        x, weight, known = _parts(product)
        fits = shape(bias) == shape(product)[1:] and bias.meta["val"].dtype == product.meta["val"].dtype
        if known is None and fits and not isinstance(placement(bias), Rows) and len(product.users) == 1:
            linear = product.target is aten.linear.default
            args = (x, weight, bias) if linear else (bias, x, weight)
            target: Any = aten.linear.default if linear else aten.addmm.default
            _replace(total, Builder(total).call(target, *args, val=total.meta["val"]))
            return


_PRODUCTS = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default)
_SCALINGS = (aten.mul.Tensor, aten.div.Tensor)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)
_MOVES = (ops.halo_exchange, ops.halo_reduce, ops.relayout)
_ERASABLE = frozenset({*_PRODUCTS, *_SCALINGS, *_SUMS, *_MOVES, ops.spmm, aten.expand_as.default, aten.expand.default})


def _is_product(node: fx.Node) -> bool:
    """Whether a node is the product of rows ``[rows, F]`` with a matrix that is the same on every rank."""
    if node.target not in _PRODUCTS or node.kwargs or len(shape(node)) != 2:
        return False
    x, weight, bias = _parts(node)
    place = placement(x)
    rows = isinstance(place, Rows) and (place.dim, place.factor) == (0, 1)
    whole = all(not isinstance(placement(n), Rows) for n in (weight, bias) if n is not None)
    return rows and whole and len(shape(x)) == len(shape(weight)) == 2 and (bias is None or len(shape(bias)) == 1)


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Rows, matrix and bias of a product."""
    operands: list[Any] = list(node.args)
    if node.target is aten.addmm.default:
        return operands[1], operands[2], operands[0]
    return operands[0], operands[1], operands[2] if len(operands) > 2 else None


def _width(node: fx.Node) -> int:
    return int(shape(node)[1])


def _applied(product: fx.Node, rows: fx.Node, before: fx.Node) -> fx.Node:
    """The product without its bias, of other rows."""
    _, weight, _ = _parts(product)
    target: Any = aten.mm.default if product.target is aten.addmm.default else product.target
    val = rows.meta["val"].new_empty((rows.meta["val"].shape[0], product.meta["val"].shape[1]))
    return _like(product, Builder(before).call(target, rows, weight, val=val), rows)


def _again(node: fx.Node, moved: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    """A node of a tree over other operands, which have another number of columns."""
    args = tuple(moved[a] if isinstance(a, fx.Node) and a in moved else _one_column(a) for a in node.args)
    width = next(moved[n].meta["val"].shape[1] for n in node.all_input_nodes if n in moved)
    val = node.meta["val"].new_empty((node.meta["val"].shape[0], width))
    target: Any = node.target
    kwargs: dict[str, Any] = dict(node.kwargs)
    new = Builder(before).call(target, *args, val=val, **kwargs)
    return _like(node, new, node)


def _like(known: fx.Node, new: fx.Node, place: fx.Node) -> fx.Node:
    val = new.meta["val"]
    copy_meta(known, new)
    new.meta["val"], meta(new).placement = val, meta(place).placement
    return new


def _replace(node: fx.Node, new: fx.Node) -> None:
    copy_meta(node, new)
    node.replace_all_uses_with(new)


def _one_column(value: Any) -> Any:
    """The one column that a factor repeats for every column of a value; the factor itself if it has but one."""
    if isinstance(value, fx.Node) and value.target in (aten.expand_as.default, aten.expand.default):
        source = value.args[0]
        assert isinstance(source, fx.Node)
        return source
    return value


def _scales_rows(factor: Any) -> bool:
    """Whether a factor is a number, or one number for each row."""
    if not isinstance(factor, fx.Node):
        return isinstance(factor, (int, float))
    if not is_tensor(factor):
        return True
    sizes = shape(_one_column(factor))
    return len(sizes) == 0 or (len(sizes) <= 2 and sizes[-1] == 1)


def _values(node: fx.Node) -> list[fx.Node] | None:
    """What a node combines in the same way in every column; None if it is no such operator."""
    args: list[Any] = list(node.args)
    if len(shape(node)) != 2 or not is_tensor(node):
        return None
    if node.target is ops.spmm:
        weight = args[3]
        return args[:1] if args[5] in ("sum", "mean") and (weight is None or len(shape(weight)) == 1) else None
    if node.target in _MOVES:
        return args[:1] if (*args, 0)[2] == 0 else None
    if len(args) != 2:
        return None
    a, b = args
    if node.target in _SCALINGS and not node.kwargs:
        if is_tensor(a) and shape(a) == shape(node) and _scales_rows(b):
            return [a]
        commutes = node.target is aten.mul.Tensor and is_tensor(b) and shape(b) == shape(node) and _scales_rows(a)
        return [b] if commutes else None
    if node.target in _SUMS and all(is_tensor(n) and shape(n) == shape(node) for n in args):
        return args
    return None


def _reach(linear: fx.Node) -> list[fx.Node]:
    """A value and all that is made of it alone in the same way in every column, in order."""
    tree = {linear: None}
    for node in linear.graph.nodes:
        values = _values(node)
        if values and all(n in tree for n in values) and not any(n in tree for n in _others(node, values)):
            tree[node] = None
    return list(tree)


def _read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether any but some nodes reads a value; one that reads its shape for them does not count."""
    return any(
        user not in inside
        and not (user.target is aten.expand_as.default and user.args[0] is not node and inside.issuperset(user.users))
        for user in node.users
    )


def _others(node: fx.Node, values: list[fx.Node]) -> list[fx.Node]:
    factors = [_one_column(a) for a in node.args if a not in values]
    return [n for n in factors if isinstance(n, fx.Node)]


def _sources(top: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The one value that another is made of in the same way in every column by aggregations, and by which nodes."""
    inner: set[fx.Node] = set()
    leaves: set[fx.Node] = set()
    stack = [top]
    while stack:
        node = stack.pop()
        values = _values(node)
        if values is None:
            leaves.add(node)
        elif node not in inner:
            inner.add(node)
            stack += values
    if len(leaves) != 1 or not any(n.target is ops.spmm for n in inner):
        return None
    return leaves.pop(), sorted(inner)
