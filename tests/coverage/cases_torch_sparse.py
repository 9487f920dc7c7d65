"""Sparse adjacency matrices in plain PyTorch, with values that are learned or computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases_torch import CASES, Layer
from coverage_cases import NODES, Case, edge_features, edges, features
from torch import Tensor

_Function = Callable[[Layer, Tensor, Tensor], Any]


def _case(function: _Function) -> _Function:
    """Register a function ``(layer, x, adjacency)`` as a case."""

    def build() -> tuple[Layer, tuple[Tensor, ...]]:
        return Layer(function), (
            features(),
            torch.sparse_coo_tensor(edges(), edge_features(), (NODES, NODES)).coalesce(),
        )

    CASES.append(Case("torch", function.__name__.replace("_", " "), build))
    return function


@_case
def sparse_attention(m: Layer, x: Tensor, adj: Tensor) -> Tensor:
    h, (row, col) = m.a(x), adj.indices()
    score = torch.exp(-F.leaky_relu(torch.cat([h[row], h[col]], dim=1) @ m.table[:2].flatten()))
    attention = torch.sparse_coo_tensor(adj.indices(), score, adj.size())
    return m.b(torch.sparse.mm(attention, h) / (torch.sparse.mm(attention, torch.ones(x.size(0), 1)) + 1e-9))


@_case
def sparse_softmax_with_learned_temperature(m: Layer, x: Tensor, adj: Tensor) -> Tensor:
    return m.b(torch.sparse.mm(torch.sparse.softmax(adj * m.vector[0], dim=1), m.a(x)))
