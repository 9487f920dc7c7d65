"""Stretches of a program that are computed again in the backward pass instead of keeping what they made.

Activation checkpointing (Chen et al., 2016) on the rewritten program: a stretch ends with an aggregation, or in front of
an operator that crosses ranks or writes. What enters it is kept, what is made inside, edge values above all, is not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import checkpoint

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import meta

_ENDS = frozenset({ops.spmm, ops.attention, ops.scatter})

Evaluate: TypeAlias = Callable[[fx.Node, Mapping[fx.Node, Any]], Any]


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive operators that are computed again.

    Attributes:
        nodes: In order.
        all_input_nodes: What they read from outside.
        outputs: What is read outside.
    """

    nodes: tuple[fx.Node, ...]
    all_input_nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    def run(self, values: Mapping[fx.Node, Any], evaluate: Evaluate) -> dict[fx.Node, Any]:
        """The outputs.

        Args:
            values: Those of the input nodes.
            evaluate: Runs a node on the values of its arguments; called again in the backward pass.
        """
        given = [values[n] for n in self.all_input_nodes]

        def compute(*given: Any) -> tuple[Any, ...]:
            local = dict(zip(self.all_input_nodes, given, strict=True))
            for node in self.nodes:
                local[node] = evaluate(node, local)
            return tuple(local[n] for n in self.outputs)

        if torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in given):
            # The masks of dropouts are keyed: there is no state of a random generator to restore.
            found = checkpoint.checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            found = compute(*given)
        return dict(zip(self.outputs, found, strict=True))


Item: TypeAlias = fx.Node | Stretch


def stretches(nodes: Sequence[fx.Node]) -> list[Item]:
    """A program's nodes with stretches of more than one operator taken together; inputs and parameters come first."""
    found: list[Item] = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    run: list[fx.Node] = []

    def close() -> None:
        found.extend([_stretch(run)] if len(run) > 1 else run)
        run.clear()

    for node in nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        if not _repeatable(node):
            close()
            found.append(node)
            continue
        run.append(node)
        if node.target in _ENDS:
            close()
    close()
    return found


def _stretch(nodes: list[fx.Node]) -> Stretch:
    inside = set(nodes)
    given = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outputs = (node for node in nodes if any(user not in inside for user in node.users))
    return Stretch(tuple(nodes), tuple(given), tuple(outputs))


def _repeatable(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target in ops.CROSSING or node.target is operator.getitem or meta(node).kept:
        return False
    return not (isinstance(node.target, OpOverload) and node.target._schema.is_mutable)
