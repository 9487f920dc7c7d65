"""Names of bound programs: two ranks call something by one name only where it is the same, whatever else each has made."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from sylvie_fx.graphs.sharded import Space
from sylvie_fx.ir.printing import operator_name
from sylvie_fx.ir.program import Program
from sylvie_fx.ir.written import stamp
from sylvie_fx.runtime.digest import digest
from sylvie_fx.runtime.transport import Transport

_SHOWN = 8
"""Hexadecimal digits of a digest in a name."""


class Names:
    """Makes the names of one rank's programs; digests of programs and of the graph's tensors are kept with them.

    Numbers in the order in which programs are made would name two things alike where one rank alone has made a third.

    Args:
        transport: Counts programs that nothing tells apart, such as those of two models of one kind.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._programs: weakref.WeakKeyDictionary[Program, str] = weakref.WeakKeyDictionary()
        self._spaces: weakref.WeakKeyDictionary[Space, str] = weakref.WeakKeyDictionary()
        self._tensors = WeakTensorKeyDictionary()

    def name(self, title: str, program: Program, static: Sequence[Tensor], spaces: Sequence[Space]) -> str:
        """The name of a program that is bound to data.

        Args:
            title: What a person would call it.
            program: The rewritten program.
            static: The graph's tensors that it reads, whole.
            spaces: The row spaces of the call.
        """
        if program not in self._programs:
            self._programs[program] = program_digest(program)
        for space in spaces:
            if space not in self._spaces:
                self._spaces[space] = digest(space.layout.owner)
        parts = [self._programs[program], *(self._spaces[s] for s in spaces), *(self._digest(t) for t in static)]
        name = f"program {title} {digest(parts)[:_SHOWN]}"
        number = self._transport.next_number(name)
        return f"{name} ({number + 1})" if number else name

    def _digest(self, tensor: Tensor) -> str:
        known: tuple[int | str, str] | None = self._tensors.get(tensor)
        now = stamp(tensor)
        if known is None or known[0] != now:
            known = self._tensors[tensor] = (now, digest(tensor))
        return known[1]


def program_digest(program: Program) -> str:
    """A digest of the operators of a program, their constants and the types of their results, in any order."""
    graphs = [program.graph, *([program.prologue.graph] if program.prologue is not None else [])]
    return digest([program.mode, *[sorted(_line(node) for node in graph.nodes) for graph in graphs]])


def _line(node: fx.Node) -> str:
    """A node without the names of nodes and sizes, which may be numbered in another order elsewhere."""
    target = operator_name(node.target) if node.op == "call_function" else node.op
    constants = [str(a) for a in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(a, fx.Node)]
    return f"{target}({', '.join(constants)}): {_type(node.meta.get('val'))}"


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{[size if isinstance(size, int) else '?' for size in value.shape]}"
    return type(value).__name__
