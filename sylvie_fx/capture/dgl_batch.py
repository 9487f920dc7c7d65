"""The sizes of the graphs of a batch, in the place of the tensors that DGL has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sylvie_fx.capture.dgl_index import refusal


class OneBatch(tuple[Any]):
    """Sizes of the graphs of a batch, where the batch is one graph."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int]:
        """``(1,)``."""
        return (1,)

    def tolist(self) -> list[Any]:
        """As of a tensor."""
        return list(self)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a tensor would have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(f"the sizes of a batch as a tensor ({name})", "the graph is one graph, and its size a symbol")


class Segments:
    """Sizes of the graphs of a batch, known by which graph each row belongs to.

    Args:
        member: The graph of each row, int64 ``[N]`` or ``[E]``.
        count: How many graphs there are.
    """

    def __init__(self, member: Tensor, count: int) -> None:
        self.member, self.count = member, count

    @property
    def shape(self) -> tuple[int]:
        """``(count,)``."""
        return (self.count,)

    def __len__(self) -> int:
        return self.count

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what a tensor would have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise refusal(
            f"the sizes of the graphs of a batch as a tensor ({name})",
            "rows of a graph of the batch may lie on several ranks",
            remedy="use DGL's readout, softmax and broadcast functions, or a node feature that says which graph a node is of",
        )


@dataclass(frozen=True)
class Batch:
    """Which graph of a batch each node ``[N]`` and each edge ``[E]`` belongs to."""

    nodes: Tensor
    edges: Tensor
    count: int


def batch_size(graph: Any) -> int:
    """How many graphs a DGLGraph is a batch of.

    Not by DGL's own property: it fills a dict of the graph in two steps, between which another thread may look.
    """
    sizes = (graph._batch_num_nodes or {}).get(graph.ntypes[0])
    return 1 if sizes is None else len(sizes)


def members(sizes: Tensor) -> Tensor:
    """The number of its graph for each row, int64, of the graphs' sizes."""
    return torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes.long())
