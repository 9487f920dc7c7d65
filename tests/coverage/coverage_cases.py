"""What the coverage table tries: a case is a module, its data, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NODES, EDGES, WIDTH = 60, 300, 8


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        framework: ``pyg`` or ``dgl``.
        name: The convolution, and what is special about this use of it.
        build: Makes the module and what it is called with.
        refusal: A part of the message with which it is refused; None where it must be exact.
        steps: Training steps that are compared.
        tolerance: Where one device differs from itself when edges are permuted: by how much.
        slow: Tried for the table alone, not by the tests.
        kinds: What ``shard`` is told of the data, where shapes do not tell.
    """

    framework: str
    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    refusal: str | None = None
    steps: int = 1
    tolerance: float | None = None
    kinds: tuple[str | None, ...] | None = None
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.framework}-{self.name}".replace(" ", "-")


def edges() -> Tensor:
    """A random graph of 60 nodes with isolated nodes, self loops, parallel edges and a hub: ``[2, 300]``."""
    generator = torch.Generator().manual_seed(7)
    index = torch.randint(0, NODES - 4, (2, EDGES), generator=generator)  # the last four nodes are isolated
    index[0, :40] = 3  # a hub, in both directions
    index[1, 40:80] = 3
    index[:, 80:86] = torch.arange(6)  # self loops
    index[:, 90:96] = index[:, 100:106]  # parallel edges
    return index


def features(width: int = WIDTH, seed: int = 0) -> Tensor:
    """Node rows."""
    return torch.randn(NODES, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def edge_features(width: int | None = None, seed: int = 1, *, gradient: bool = False) -> Tensor:
    """Edge rows, positive; one number an edge without a width."""
    shape = (EDGES,) if width is None else (EDGES, width)
    values = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    return values.requires_grad_(gradient)


def types(count: int, rows: int = EDGES) -> Tensor:
    """A type for each row."""
    return torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(2))


def mlp(width: int, out: int = WIDTH) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, out))


class Named(nn.Module):
    """Gives a layer some of its arguments by name."""

    def __init__(self, layer: nn.Module, *names: str, **constants: Any) -> None:
        super().__init__()
        self.layer, self.names, self.constants = layer, names, constants

    def forward(self, *data: Any) -> Any:
        positional = len(data) - len(self.names)
        return self.layer(*data[:positional], **dict(zip(self.names, data[positional:], strict=True)), **self.constants)
