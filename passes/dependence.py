"""What a value of the main graph depends on."""

from __future__ import annotations

from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and everything that it is computed from."""
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack += current.all_input_nodes
    return seen


def depends_on_inputs_alone(program: Program, node: fx.Node) -> bool:
    """Whether a value is a fixed function of inputs without gradient: no parameter, buffer or random mask is in it."""
    found = ancestors(node)
    if any(n.op == "get_attr" or n.target is ops.node_dropout for n in found):
        return False
    entries = {i.name for i in program.inputs if not i.static}
    return not any(n.op == "placeholder" and n.name in entries and n.meta["val"].requires_grad for n in found)


def needs_gradient(program: Program, node: fx.Node) -> bool:
    """Whether gradients flow through a value: a parameter, or an input with gradient, is in it."""
    entries = {i.name for i in program.inputs if not i.static}
    for n in ancestors(node):
        if n.target in (ops.sync_gradients, ops.sync_finish):
            return True
        if n.op == "get_attr" and n.meta["val"].requires_grad:
            return True
        if n.op == "placeholder" and n.name in entries and n.meta["val"].requires_grad:
            return True
    return False
