"""The structure of a graph as plain tensors, behind the interface that DGL's own Python code asks of its C++ index."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor

from sylvie_fx.ir.errors import CaptureError

Size = Any  # int or torch.SymInt
_OURS = ("sylvie_fx.", "torch.", "contextlib", "unittest.")


class _OneRelation:
    """The metagraph of a homogeneous graph: one node type, one edge type between it and itself."""

    def find_edge(self, etid: int) -> tuple[int, int]:
        return 0, 0


class StandInIndex:
    """Edges in their natural order, never sorted and never compressed.

    Args:
        src: Source of each edge, ``[E]``, int32 or int64.
        dst: Destination of each edge, ``[E]``.
        num_nodes: ``N``, an int or a symbol.
    """

    metagraph = _OneRelation()

    def __init__(self, src: Tensor, dst: Tensor, num_nodes: Size) -> None:
        self.src, self.dst, self.size = src, dst, num_nodes

    def number_of_etypes(self) -> int:
        """One."""
        return 1

    def number_of_ntypes(self) -> int:
        """One."""
        return 1

    def num_nodes(self, ntid: int = 0) -> Size:
        """``N``."""
        return self.size

    def num_edges(self, etid: int = 0) -> Size:
        """``E``."""
        return self.src.shape[0]

    number_of_nodes, number_of_edges = num_nodes, num_edges

    @property
    def dtype(self) -> str:
        """Name of the id type."""
        return "int32" if self.src.dtype == torch.int32 else "int64"

    @property
    def nbits(self) -> int:
        """Width of an id."""
        return 32 if self.src.dtype == torch.int32 else 64

    def is_pinned(self) -> bool:
        """False: pinned memory means nothing while capturing."""
        return False

    def pin_memory_(self) -> None:
        """Nothing."""

    def create_formats_(self) -> None:
        """Nothing: the captured program has one format."""

    def formats(self, formats: object = None) -> Any:
        """All formats count as created; restricting them changes nothing."""
        return {"created": ["coo"], "not created": ["csr", "csc"]} if formats is None else self

    def asbits(self, bits: int) -> StandInIndex:
        """The same edges with ids of 32 or 64 bits."""
        dtype = torch.int32 if bits == 32 else torch.int64
        return self if self.src.dtype == dtype else StandInIndex(self.src.to(dtype), self.dst.to(dtype), self.size)

    def edges(self, etid: int = 0, order: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Sources, destinations and ids of all edges, in the order of their ids.

        Args:
            etid: The one edge type.
            order: Anything but ``"srcdst"``, which would sort.
        """
        if order == "srcdst":
            raise refusal("edges sorted by their end nodes", "the captured program keeps the natural order of edges")
        return self.src, self.dst, self.edge_ids()

    def edge_ids(self) -> Tensor:
        """``arange(E)``, ``[E]``."""
        return torch.arange(self.num_edges(), dtype=self.src.dtype, device=self.src.device)

    def reverse(self) -> StandInIndex:
        """The same edges, turned around."""
        return StandInIndex(self.dst, self.src, self.size)

    def degrees(self, incoming: bool) -> Tensor:
        """Number of edges into (or out of) each node, ``[N]``, in the id type."""
        ends = self.dst if incoming else self.src
        return ends.new_zeros(self.size).index_add(0, ends, torch.ones_like(ends))

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse everything else of DGL's index."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(f"the graph operation {name!r}", "it has no counterpart in plain gathers and scatters")


def refusal(what: str, why: str, *, where: str | None = None, remedy: str | None = None) -> CaptureError:
    """The error to raise for something of DGL that a captured program can not express."""
    return CaptureError(
        f"the model uses {what} of a DGL graph, which can not be captured",
        where=where or user_frame(),
        why=why,
        remedy=remedy or "compute it before the graph is passed to the model, and keep the result in ndata or edata",
    )


def user_frame(inside_dgl: bool = False) -> str | None:
    """``file:line`` of the innermost caller outside of this library and torch (and DGL, unless ``inside_dgl``)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_OURS) and (inside_dgl or not f"{module}.".startswith("dgl.")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
