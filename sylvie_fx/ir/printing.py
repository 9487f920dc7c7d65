"""Programs as text: one operator a line, with global symbolic shape, placement, module path and source line."""

from __future__ import annotations

import os
from typing import Any

import sympy
import torch
from torch import fx

from sylvie_fx.ir.program import Meta, Program, meta


def program_text(program: Program) -> str:
    """The program as text, the same for the same program: no ids, no addresses, no times."""
    lines = [f"program {program.mode}"]
    if program.prologue is not None:
        lines.append("prologue (once, on the whole graph):")
        lines += ["  " + line for line in graph_lines(program, program.prologue.graph)]
        lines.append("main (every step, on this rank's rows):")
        lines += ["  " + line for line in graph_lines(program, program.graph)]
    else:
        lines += ["  " + line for line in graph_lines(program, program.graph)]
    if program.components:
        lines.append("layouts:")
        lines += [f"  {c}" for c in program.components.values()]
    if program.codings:
        lines.append("codings (forward / backward):")
        lines += [f"  site {site}: {coding}" for site, coding in program.codings.items()]
    if any(not pace.synchronous for pace in program.paces.values()):
        lines.append("staleness (forward / backward):")
        lines += [f"  site {site}: {pace}" for site, pace in program.paces.items()]
    if program.near:
        lines.append("to ranks of the same host:")
        lines += [f"  site {site}: {tier}" for site, tier in program.near.items()]
    if program.slots:
        lines.append("exchanges:")
        lines += [f"  {s}" for s in program.slots]
    return "\n".join(lines) + "\n"


def graph_lines(program: Program, graph: fx.Graph) -> list[str]:
    """One line for each node, comments aligned."""
    rows = [(statement(program, node), comment(program, node)) for node in graph.nodes]
    width = min(max((len(s) for s, _ in rows), default=0), 96)
    return [f"{s:<{width}}  # {c}".rstrip() if c else s for s, c in rows]


def statement(program: Program, node: fx.Node) -> str:
    """The node as an assignment."""
    if node.op == "placeholder":
        bound = program.localized.get(node.name)
        if bound is not None:
            return f"{node.name} = local({bound})"
        if node.name in program.counts:
            return f"{node.name} = count(#{program.counts[node.name][0]} {program.counts[node.name][1]})"
        if node.name in program.numbers:
            return f"{node.name} = number({program.numbers[node.name]})"
        if node.name in program.row_ids:
            return f"{node.name} = row_ids(#{program.row_ids[node.name][0]} {program.row_ids[node.name][1]})"
        return f"{node.name} = input()"
    if node.op == "get_attr":
        return f"{node.name} = self.{str(node.target).removeprefix('model.')}"
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{node.name} = {operator_name(node.target)}({', '.join(arguments)})"


def operator_name(target: Any) -> str:
    """``aten.add``, ``sylvie.gather``: the overload only where it is not the default one."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(v) for v in value)
        return f"[{inner}]"
    return str(value)


def comment(program: Program, node: fx.Node) -> str:
    """Shape, type, placement, module and source line of a node."""
    if node.op == "output":
        return ""
    known = meta(node)
    parts = [p for p in (_type(program, node), _placement(known), known.module, _short(known.where)) if p]
    return " | ".join(parts)


def _placement(known: Meta) -> str:
    if known.placement is None:
        return ""
    if isinstance(known.placement, tuple):
        return ", ".join(str(p) for p in known.placement)
    return str(known.placement)


def _type(program: Program, node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(size_text(program, s) for s in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, torch.SymInt):
        return size_text(program, value)
    return ""


def size_text(program: Program, size: Any) -> str:
    """A size in the row spaces' names."""
    if not isinstance(size, torch.SymInt):
        return str(size)
    names = {known: sympy.Symbol(name) for name, known in program.sizes.items() if known.is_Symbol}
    return str(size.node.expr.subs(names))


def _short(where: str) -> str:
    path, _, line = where.rpartition(":")
    return f"{os.path.basename(path)}:{line}" if path else ""
