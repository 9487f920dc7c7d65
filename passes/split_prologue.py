"""Split off everything that depends on the graph alone: it runs once, on the whole graph, before partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.effects import ASSERTIONS, CHECKS
from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.placement import REPLICATED
from sylvie_fx.ir.program import Localized, Program, is_number, is_tensor, meta, shape, size_expression
from sylvie_fx.passes.base import Pass, PassContext, refuse
from sylvie_fx.passes.build import copy_meta
from sylvie_fx.passes.static import FACTORIES, mark_static

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitPrologue(Pass):
    """Move graph-only computation (degrees, normalisation, added self loops, masks' positions) into the prologue.

    Requires: canonicalize.
    Ensures: the main graph reads graph-only values as placeholders bound to prologue results; equal graph-only
    computations are one; constants made from sizes alone stay in the main graph, where they cost no memory of N rows.

    Before::

        src = aten.select.int(edge_index, 0, 0)
        out = sylvie.gather(x, src)

    After::

        prologue: src = aten.select.int(edge_index, 0, 0)
        main:     src = local(src)
                  out = sylvie.gather(x, src)
    """

    name: ClassVar[str] = "split-prologue"

    def run(self, program: Program, context: PassContext) -> Program:
        """Split once; a program that has a prologue is left alone."""
        if program.prologue is not None:
            return program
        mark_static(program)
        merge_equal(program)
        _split(program)
        return program


def merge_equal(program: Program) -> None:
    """Common subexpression elimination on graph-only values; sizes of merged masks become equal symbols."""
    seen: dict[Any, fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not meta(node).static or node.target in FACTORIES:
            continue
        key = (node.target, _key(program, node.args), _key(program, node.kwargs))
        known = seen.setdefault(key, node)
        if known is not node:
            _equal_sizes(known, node)
            node.replace_all_uses_with(known)
            program.graph.erase_node(node)


def _key(program: Program, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_key(program, v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(program, v)) for k, v in sorted(value.items()))
    if isinstance(value, fx.Node) and is_number(value):
        return ("size", str(size_expression(value)))
    if isinstance(value, fx.Node) and value.target in FACTORIES:
        return (value.target, _key(program, value.args), str(value.kwargs.get("dtype")))
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return (type(value).__name__, value)


def _equal_sizes(kept: fx.Node, merged: fx.Node) -> None:
    a, b = kept.meta.get("val"), merged.meta.get("val")
    sizes = (
        zip(a.shape, b.shape, strict=True) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else [(a, b)]
    )
    for left, right in sizes:
        if isinstance(left, torch.SymInt) and isinstance(right, torch.SymInt) and left.node.expr != right.node.expr:
            old, new = right.node.expr, left.node.expr
            if old.is_Symbol:
                # Both counts are of one mask; the shape environment then shows one symbol for both everywhere.
                left.node.shape_env._set_replacement(old, new, "sylvie: equal graph-only values")


class Numbers:
    """Finds or makes graph-only nodes that hold the value of a size expression."""

    def __init__(self, graph: fx.Graph, usable: Any) -> None:
        self.graph, self.usable = graph, usable

    def node(self, expr: sympy.Expr) -> fx.Node | int:
        """A node (or a plain int) with that value, at the end of the graph's present nodes."""
        if expr.is_Integer:
            return int(expr)
        for candidate in self.graph.nodes:
            if not self.usable(candidate):
                continue
            if is_tensor(candidate) and candidate.target not in FACTORIES:
                for dim, size in enumerate(shape(candidate)):
                    if size == expr:
                        return self._insert(aten.sym_size.int, (candidate, dim), candidate.meta["val"].shape[dim])
        if expr.is_Add or expr.is_Mul:
            import operator

            op = operator.add if expr.is_Add else operator.mul
            total = self.node(expr.args[0])
            for part in expr.args[1:]:
                other = self.node(part)
                if isinstance(total, int) and isinstance(other, int):
                    total = op(total, other)
                else:
                    values = [v if isinstance(v, int) else v.meta["val"] for v in (total, other)]
                    total = self._insert(op, (total, other), op(*values))
            return total
        raise VerifyError(f"no graph-only value has the size {expr}")

    def _insert(self, op: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
        known: fx.Node
        for known in self.graph.nodes:
            if known.target is op and known.args == args:
                return known
        node = self.graph.call_function(op, args)
        node.meta["val"] = val
        meta(node).static = True
        return node


def prologue_number(program: Program, expr: sympy.Expr) -> fx.Node | int:
    """A main placeholder that holds the global value of a size expression (or the int itself)."""
    assert program.prologue is not None
    graph = program.prologue.graph
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        number = Numbers(graph, lambda n: n.op != "output").node(expr)
    if isinstance(number, int):
        return number
    results = output.args[0]
    assert isinstance(results, tuple)
    if number not in results:
        output.args = ((*results, number),)
    for name, value in program.numbers.items():
        if value == number.name:
            bound: fx.Node = next(n for n in program.graph.nodes if n.name == name)
            return bound
    first = next(iter(program.graph.nodes))
    with program.graph.inserting_before(first):
        new = program.graph.placeholder(f"size_{number.name}")
    new.meta["val"] = number.meta["val"]
    meta(new).placement = REPLICATED
    program.numbers[new.name] = number.name
    return new


_CHECKED: frozenset[Any] = ASSERTIONS | {ops.check, ops.check_size}
"""What a prologue runs for its effect."""


def _stays(node: fx.Node) -> bool:
    return node.target not in CHECKS and (node.op == "output" or not meta(node).static or node.target in FACTORIES)


def _size(node: fx.Node, numbers: Numbers) -> fx.Node | int:
    expr = size_expression(node)
    assert expr is not None
    try:
        return numbers.node(expr)
    except VerifyError:
        raise refuse(node, f"the number of rows {expr} depends on features", "it would differ from step to step and from rank to rank",
                     "pick rows by masks or ids of the graph, or multiply by a mask") from None  # fmt: skip


def _check(node: fx.Node, prologue: fx.Graph, copies: dict[fx.Node, Any]) -> None:
    """A decided branch: checked on the whole graph, or refused where features decide it."""
    condition, decided = node.args[0], str(node.args[-1])
    if condition not in copies:
        raise refuse(node, f"a Python branch or number depends on values computed from features or parameters ({decided})",
                     "it could go another way in each step", "express it with tensor operations (torch.where)")  # fmt: skip
    known = copies[condition]  # type: ignore[index]
    if not isinstance(known, fx.Node):
        return
    if node.target is ops.check_size:
        check = prologue.call_function(ops.check_size, (known, *node.args[1:], meta(node).where))
    else:
        check = prologue.call_function(ops.check, (known, decided, meta(node).where))
    copy_meta(node, check)


def _split(program: Program) -> None:
    main, prologue = program.graph, fx.Graph()
    copies: dict[fx.Node, Any] = {}
    inputs = {item.name: item for item in program.inputs}
    numbers = Numbers(prologue, lambda n: True)
    for node in main.nodes:
        if node.target in CHECKS:
            _check(node, prologue, copies)
            continue
        if node.op == "output" or not meta(node).static:
            continue
        if node.target in (aten.sym_size.int, aten.sym_numel.default):
            copies[node] = _size(node, numbers)
            continue
        copies[node] = prologue.node_copy(node, lambda n: copies[n])
        copy_meta(node, copies[node])
    boundary: dict[fx.Node, fx.Node] = {}
    results: list[fx.Node] = []
    first = next(iter(main.nodes))
    for node in list(main.nodes):
        if node.op == "output" or node.target in CHECKS or not meta(node).static:
            continue
        outside = [u for u in node.users if _stays(u)]
        if not outside or node.target in FACTORIES:
            continue
        copy = copies[node]
        if isinstance(copy, int):
            for user in outside:
                user.args = fx.node.map_arg(user.args, lambda n, node=node, copy=copy: copy if n is node else n)  # type: ignore[misc]
            continue
        with main.inserting_before(first):
            new = main.placeholder(copy.name)
        copy_meta(node, new)
        meta(new).static = True
        for user in outside:
            user.replace_input_with(node, new)
        boundary[new] = copy
        if copy not in results:
            results.append(copy)
        if is_number(node):
            program.numbers[new.name] = copy.name
            meta(new).placement = REPLICATED
        else:
            program.localized[new.name] = Localized(copy.name, REPLICATED)
    kept = {
        n for n in main.nodes if n.target in FACTORIES and any(not meta(u).static or u.op == "output" for u in n.users)
    }
    for node in reversed(list(main.nodes)):
        if node.op == "output" or node in boundary or node in kept:
            continue
        if (meta(node).static or node.target in CHECKS) and not node.users:
            main.erase_node(node)
    prologue.output(tuple(results))
    for node in reversed(list(prologue.nodes)):
        if node.op not in ("output", "placeholder") and not node.users and node.target not in _CHECKED:
            prologue.erase_node(node)
    program.prologue = fx.GraphModule(program.module, prologue)
    for name in inputs:
        if inputs[name].static and not any(n.name == name for n in prologue.nodes if n.op == "placeholder"):
            raise VerifyError(f"the static input {name} got lost in the split")
