"""Insert operators into a program with their fake results, so that later passes see shapes and source lines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload

from sylvie_fx.ir.placement import Placement
from sylvie_fx.ir.program import Meta, meta


class Builder:
    """Inserts nodes before one node of a graph.

    Args:
        before: Where to insert; source line and module of the new nodes are this node's.
    """

    def __init__(self, before: fx.Node) -> None:
        self.before, self.graph = before, before.graph

    def call(
        self,
        op: OpOverload | Callable[..., Any],
        *args: Any,
        place: Placement | None = None,
        val: Any = None,
        **kwargs: Any,
    ) -> fx.Node:
        """A new node.

        Args:
            op: The operator.
            *args: Its arguments, nodes or constants.
            place: Its placement, where that is known already.
            val: Its fake result; computed from the arguments' by default.
            **kwargs: Keyword arguments of the operator.
        """
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = fake(op, args, kwargs) if val is None else val
        known = meta(self.before)
        node.meta["sylvie"] = Meta(placement=place, where=known.where, module=known.module)
        return node


def fake(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake result of an operator applied to nodes that have fake results."""
    values = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode(torch.utils._pytree.tree_leaves(values))
    if mode is None:
        return op(*values[0], **values[1])
    with mode, torch.no_grad():
        return op(*values[0], **values[1])


def replace(node: fx.Node, new: fx.Node) -> None:
    """Let every use of ``node`` read ``new`` and erase it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    """Give a node the fake result and typed metadata of another."""
    target.meta = dict(source.meta)
    if "sylvie" in source.meta:
        target.meta["sylvie"] = copy.copy(source.meta["sylvie"])
