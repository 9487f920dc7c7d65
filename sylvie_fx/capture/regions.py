"""``with torch.no_grad():`` inside a forward pass: torch.export makes a graph of it, which is put back in place here."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from sylvie_fx.ir.errors import CaptureError
from sylvie_fx.ir.source import user_line

_NO_GRAD: Any = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST: Any = getattr(torch.ops.higher_order, "wrap_with_autocast", None)


def inline_regions(module: fx.GraphModule) -> None:
    """Put the operators of such regions among the others; without gradients, what enters a region is detached.

    Raises:
        CaptureError: A region computes in another precision (autocast).
    """
    for node in list(module.graph.nodes):
        if node.target is _NO_GRAD:
            enabled, body, *operands = node.args
            entering = [_entering(node, v, detach=not enabled) for v in operands]
            _inline(module, node, getattr(module, body.target), entering, operands)
        elif _AUTOCAST is not None and node.target is _AUTOCAST:
            inner = getattr(module, node.args[4].target).graph
            lines = (user_line(n.meta.get("stack_trace")) for n in inner.nodes)
            raise CaptureError(
                "the forward pass computes a part of itself under autocast", where=next((x for x in lines if x), None),
                why="which operators then change their precision is decided outside the captured program",
                remedy="convert tensors with .to(dtype) where a lower precision is wanted, or leave autocast out",
            )  # fmt: skip


def _entering(region: fx.Node, value: Any, *, detach: bool) -> Any:
    if not detach or not isinstance(value, fx.Node):
        return value
    tensor = value.meta.get("val")
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or _is_buffer(region, value):
        return value
    with region.graph.inserting_before(region):
        detached = region.graph.call_function(torch.ops.aten.detach.default, (value,))
    detached.meta = {k: v for k, v in value.meta.items() if k in ("val", "stack_trace", "nn_module_stack")}
    detached.meta["val"] = tensor.detach()
    return detached


def _is_buffer(region: fx.Node, node: fx.Node) -> bool:
    """Buffers need no gradient, and have to be written to themselves."""
    module = region.graph.owning_module
    return node.op == "get_attr" and not operator.attrgetter(str(node.target))(module).requires_grad


def _inline(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, entering: list[Any], given: list[Any]) -> None:
    copies: dict[fx.Node, Any] = {}
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    outside = dict(zip(placeholders, given, strict=True))
    copies.update(zip(placeholders, entering, strict=True))
    for inner in body.graph.nodes:
        if inner.op == "output":
            # What the region wrote to in place leaves it as the tensor that it was, with its gradient.
            results = [outside[m] if (m := _memory(v)) in outside else copies[v] for v in inner.args[0]]
            for user in list(node.users):
                assert user.target is operator.getitem
                user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
                module.graph.erase_node(user)
            module.graph.erase_node(node)
        elif inner.op != "placeholder":
            with module.graph.inserting_before(node):
                copies[inner] = module.graph.node_copy(inner, lambda n: copies[n])


def _memory(node: fx.Node) -> fx.Node:
    """The tensor that an in-place operator returns."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and node.args:
        node = node.args[0]  # type: ignore[assignment]
    return node
