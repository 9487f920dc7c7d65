"""Invariants of a program, checked after every pass."""

from __future__ import annotations

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import KEY, Program, is_tensor, meta


def verify_program(program: Program) -> None:
    """Check the program's structure, and its placements once they are inferred.

    Raises:
        VerifyError: Names the node and the invariant; the excerpt is in the notes.
    """
    for module in (program.module, program.prologue):
        if module is not None:
            try:
                module.graph.lint()
            except RuntimeError as error:
                raise VerifyError(f"the graph is malformed: {error}") from error
    output = next((n for n in program.graph.nodes if n.op == "output"), None)
    if output is None:
        raise VerifyError("the program has no output")
    if KEY not in output.meta or meta(output).placement is None:
        return
    for node in program.graph.nodes:
        _verify_node(program, node)


def _verify_node(program: Program, node: fx.Node) -> None:
    if node.op == "output":
        return
    known = meta(node)
    if known.placement is None and is_tensor(node):
        raise _broken(node, "has no placement")
    bound = any(node.name in t for t in (program.localized, program.counts, program.numbers, program.row_ids))
    entry = any(i.name == node.name for i in program.inputs)
    if node.op == "placeholder" and not (bound or entry):
        raise _broken(node, "is a placeholder that nothing binds")
    places = known.placement if isinstance(known.placement, tuple) else (known.placement,)
    for place in places:
        if isinstance(place, Rows):
            if place.component is None:
                raise _broken(node, "has rows of no component")
            if place.component and place.component not in program.components:
                raise _broken(node, f"has rows of component {place.component}, which is not declared")
    if node.target in ops.EXCHANGES or node.target is ops.halo_wait:
        slot = node.args[1]
        if not isinstance(slot, int) or not 0 <= slot < len(program.slots):
            raise _broken(node, f"names slot {slot}, which is not declared")
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(known.placement, Rows) and known.placement.dim >= value.dim():
        raise _broken(node, f"has rows in dimension {known.placement.dim} of {value.dim()}")


def _broken(node: fx.Node, what: str) -> VerifyError:
    error = VerifyError(f"{node.name} {what}", where=meta(node).where or None)
    error.add_note(node.format_node() or node.name)
    return error
