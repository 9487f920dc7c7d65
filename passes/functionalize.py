"""Rewrite in-place operators on values that the program made itself into their functional forms."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import Pass, PassContext, refuse
from sylvie_fx.passes.build import Builder, copy_meta
from sylvie_fx.passes.static import check_random, is_random

aten = torch.ops.aten

_VIEWS = frozenset({
    aten.view.default, aten.reshape.default, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.detach.default,
    aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.t.default, aten.alias.default, aten.narrow.default,
    aten.expand.default, aten.squeeze.default, aten.flatten.using_ints,
})  # fmt: skip

_BITWISE = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}
"""Operators that Python writes ``&=``, ``|=``, ``^=``."""


@dataclass(frozen=True)
class Functionalize(Pass):
    """Replace every in-place operator by its functional form; a write into a view is written back to what it views.

    Requires: nothing.
    Ensures: the only mutating operators left update buffers of the model.

    Before::

        zeros = aten.new_zeros(x, [N, 4])
        out = aten.scatter_add_(zeros, 0, index, messages)

    After::

        zeros = aten.new_zeros(x, [N, 4])
        out = aten.scatter_add(zeros, 0, index, messages)
    """

    name: ClassVar[str] = "functionalize"

    def run(self, program: Program, context: PassContext) -> Program:
        """Rewrite in place, first to last."""
        for node in list(program.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload) and _writes_self(node.target):
                _rewrite(node)
        return program


def _writes_self(op: OpOverload) -> bool:
    first = op._schema.arguments[0] if op._schema.arguments else None
    return bool(
        op._schema.is_mutable and first is not None and first.alias_info is not None and first.alias_info.is_write
    )


def _rewrite(node: fx.Node) -> None:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    chain = [target]
    while chain[-1].op == "call_function" and chain[-1].target in _VIEWS:
        base = chain[-1].args[0]
        assert isinstance(base, fx.Node)
        chain.append(base)
    root = chain[-1]
    if root.op == "get_attr":
        # A buffer (running statistics): this update must reach the model's own tensor, and so must one of its result.
        node.replace_all_uses_with(target)
        return
    if root.op == "placeholder":
        raise refuse(node, f"{root.name}, an input, is changed in place", "the caller's rows would change between steps",
                     "work on a copy: x = x.clone()")  # fmt: skip
    views = [n for n in _views_of(root) if n < node]
    builder = Builder(node)
    new = _functional(builder, node)
    value = new
    for view, base in itertools.pairwise(chain):
        value = _write_back(builder, view, base, value)
    updated = {root: value}

    def renewed(view: fx.Node) -> fx.Node:
        """The view of the written memory: what it views was written, so it is taken anew."""
        if view not in updated:
            base = view.args[0]
            assert isinstance(base, fx.Node)
            operand = renewed(base)
            with node.graph.inserting_before(node):
                updated[view] = node.graph.call_function(view.target, (operand, *view.args[1:]), view.kwargs)  # type: ignore[arg-type]
            copy_meta(view, updated[view])
        return updated[view]

    # The result of the in-place operator is its target: a write into the result is a write into the memory too.
    node.replace_all_uses_with(renewed(target))
    for view in views:  # every other alias of the same memory sees the write as well
        if any(u > node for u in view.users):
            renewed(view)
    for old, fresh in updated.items():
        _redirect(old, fresh, node)
    node.graph.erase_node(node)


def _views_of(root: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    for user in root.users:
        if user.op == "call_function" and user.target in _VIEWS and user.args[0] is root:
            found += [user, *_views_of(user)]
    return sorted(found)


def _redirect(old: fx.Node, new: fx.Node, after: fx.Node) -> None:
    for user in list(old.users):
        if user > after:
            user.replace_input_with(old, new)


def _functional(builder: Builder, node: fx.Node) -> fx.Node:
    assert isinstance(node.target, OpOverload)
    packet = node.target._schema.name.removeprefix("aten::")
    target = node.args[0]
    assert isinstance(target, fx.Node)
    if packet == "copy_":
        source = node.args[1]
        dtype = target.meta["val"].dtype
        if isinstance(source, fx.Node) and source.meta["val"].dtype != dtype:
            source = builder.call(aten._to_copy.default, source, dtype=dtype)
        return builder.call(aten.expand_as.default, source, target)
    if packet in ("fill_", "zero_"):
        if packet == "fill_" and isinstance(node.args[1], fx.Node):
            return builder.call(aten.expand_as.default, node.args[1], target)
        return builder.call(aten.full_like.default, target, node.args[1] if packet == "fill_" else 0)
    if is_random(node):
        check_random(node)
    functional = getattr(aten, _BITWISE.get(packet) or packet.rstrip("_"), None)
    op = _same_signature(functional, node.target) if functional is not None else None
    if op is None:
        raise refuse(
            node,
            f"aten.{packet} has no functional form",
            "its write can not be followed",
            "use an operator that returns a new tensor",
        )
    keywords: dict[str, Any] = dict(node.kwargs)
    return builder.call(op, *node.args, **keywords)


def _same_signature(packet: OpOverloadPacket, inplace: OpOverload) -> OpOverload | None:
    """The functional overload that takes the same types (``pow_.Scalar`` is ``pow.Tensor_Scalar``)."""
    wanted = [str(a.type) for a in inplace._schema.arguments]
    for name in packet.overloads():
        op: OpOverload = getattr(packet, name)
        if [str(a.type) for a in op._schema.arguments] == wanted:
            return op
    return None


def _write_back(builder: Builder, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
    op, rest = view.target, view.args[1:]
    if op is aten.select.int:
        return builder.call(aten.select_scatter.default, base, value, *rest)
    if op is aten.slice.Tensor:
        return builder.call(aten.slice_scatter.default, base, value, *rest)
    if op is aten.narrow.default:
        dim, start, length = rest
        return builder.call(aten.slice_scatter.default, base, value, dim, start, start + length)  # type: ignore[operator]
    if op is aten.alias.default:
        return value
    if op is aten.detach.default:  # the write is no operation of autograd: the gradient passes as if there were none
        if not base.meta["val"].is_floating_point():
            return value
        zero = builder.call(aten.sub.Tensor, base, builder.call(aten.detach.default, base))
        return builder.call(aten.add.Tensor, builder.call(aten.detach.default, value), zero)
    if op is aten.transpose.int:
        return builder.call(aten.transpose.int, value, *rest)
    if op is aten.t.default:
        return builder.call(aten.t.default, value)
    if op is aten.permute.default:
        order = list(rest[0])  # type: ignore[arg-type]
        return builder.call(aten.permute.default, value, [order.index(i) for i in range(len(order))])
    if op is aten.expand.default:
        raise refuse(
            view,
            "an expanded tensor is written in place",
            "several entries share one memory cell",
            "clone it before writing",
        )
    return builder.call(aten.reshape_as.default, value, base)
