"""Compute equal values once: aggregations, exchanges and what is row-local between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch._ops import OpOverload

from sylvie_fx.ir.program import Program, is_tensor, meta
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import replace
from sylvie_fx.passes.static import is_random


@dataclass(frozen=True)
class ShareDuplicates(Pass):
    """Let operators that are applied twice to the same operands be applied once (common subexpressions).

    Requires: infer-placement; the fusions stand in front of it, since they take messages that one operator reads.
    Ensures: no two nodes have the same operator, operands and placement, but those that draw random numbers or write.

    Before::

        a = sylvie.spmm(h, src, dst, None, rows_0, sum)
        b = sylvie.spmm(h, src, dst, None, rows_0, sum)

    After::

        a = sylvie.spmm(h, src, dst, None, rows_0, sum)
    """

    name: ClassVar[str] = "share-duplicates"

    def run(self, program: Program, context: PassContext) -> Program:
        """Replace each repetition by the first."""
        written = {n for node in program.graph.nodes if _mutates(node) for n in node.all_input_nodes}
        known: dict[Any, fx.Node] = {}
        for node in list(program.graph.nodes):
            if node.op == "get_attr":
                key: Any = ("get_attr", node.target)
            elif _is_pure(node) and written.isdisjoint(node.all_input_nodes):
                key = (node.target, _frozen(node.args), _frozen(node.kwargs), str(meta(node).placement))
            else:
                continue
            first = known.setdefault(key, node)
            if first is not node and node not in written and first not in written:
                replace(node, first)
        return program


def _is_pure(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and is_tensor(node)
        and not is_random(node)
        and not _mutates(node)
    )


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _frozen(value: Any) -> Any:
    """An argument as a key: equal for equal arguments, with the type of numbers, since ``1 == 1.0 == True``."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))
