"""Where the rows of a value live: replicated on every rank, or one share of a row space each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

NODES = "N"
"""Name of the row space of the graph's nodes."""

EDGES = "E"
"""Name of the row space of the graph's edges, in the order in which the user gave them."""


@dataclass(frozen=True)
class Replicated:
    """The same value on every rank."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Rows:
    """Each rank holds its own rows of a global tensor, ascending by global row index.

    Attributes:
        space: The row space: a readable size expression such as ``N``, ``E``, ``N + u0``.
        dim: The dimension of the tensor that carries the rows, non-negative.
        factor: Consecutive entries of that dimension that belong to one row (a ``[rows, heads]`` pair flattened).
        component: Which layout of the space: values that meet in a row-local operation share a component.
            0 is the layout in which the space enters the program; None while not yet known.
    """

    space: str
    dim: int = 0
    factor: int = 1
    component: int | None = None

    def __str__(self) -> str:
        text = f"rows[{self.space}" + (f"*{self.factor}" if self.factor != 1 else "") + "]"
        if self.dim:
            text += f"@{self.dim}"
        if self.component:
            text += f"#{self.component}"
        return text


Placement: TypeAlias = Replicated | Rows

REPLICATED = Replicated()


@dataclass(frozen=True)
class Layout:
    """How the rows of a component are assigned to ranks; evaluated on the real graph when data is sharded.

    Attributes:
        kind: ``nodes``, the partition itself; ``entry``, as the space entered the program; ``by``, the owner of row i
            is the owner of row ``index[i]`` of ``target``; ``slice``, rows ``start`` to ``start + length`` of another
            component; ``concat``, other components one after the other; ``blocks``, contiguous blocks.
        index: For ``by``: the name of the prologue value that holds the index.
        target: For ``by``: the component that the index points into.
        target_space: For ``by``: its row space.
        parts: For ``slice`` and ``concat``: the components meant, in order, and their row spaces, since all spaces have a
            component 0; ``slice`` counts its start from the global sizes of the components before ``position``.
        position: For ``slice``: which of ``parts`` this component is; ``parts[0]`` is then the whole.
    """

    kind: str
    index: str | None = None
    target: int | None = None
    target_space: str = NODES
    parts: tuple[tuple[int, str], ...] = ()
    position: int = 0

    def __str__(self) -> str:
        if self.kind == "by":
            return f"by {self.index} into {self.target_space}#{self.target}"
        if self.kind == "concat":
            return "concat of " + ", ".join(f"#{p}" for p, _ in self.parts)
        if self.kind == "slice":
            return f"part {self.position} of #{self.parts[0][0]}"
        return self.kind


@dataclass
class Component:
    """One layout of one row space."""

    number: int
    space: str
    layout: Layout

    def __str__(self) -> str:
        return f"#{self.number}: {self.space} {self.layout}"
