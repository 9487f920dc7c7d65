"""Layers of PyG on a sparse adjacency are captured and equal themselves on another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_support import LAYOUTS, adjacency, captured, features
from torch import Tensor, nn

from sylvie_fx.capture.sparse import (
    adjacency_parts,
)


class First(nn.Module):
    """The first output of a layer that returns several."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        result = self.layer(x, adj)
        return result[0] if isinstance(result, tuple) else result


PYG_LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "GCNConv": lambda pyg: pyg.GCNConv(3, 4),
    "GCNConv, improved": lambda pyg: pyg.GCNConv(3, 4, improved=True),
    "GCNConv, no loops": lambda pyg: pyg.GCNConv(3, 4, add_self_loops=False),
    "GCNConv, plain": lambda pyg: pyg.GCNConv(3, 4, normalize=False),
    "SAGEConv": lambda pyg: pyg.SAGEConv(3, 4),
    "SAGEConv, max": lambda pyg: pyg.SAGEConv(3, 4, aggr="max"),
    "SAGEConv, two": lambda pyg: pyg.SAGEConv(3, 4, aggr=["mean", "max"]),
    "GraphConv": lambda pyg: pyg.GraphConv(3, 4),
    "GINConv": lambda pyg: pyg.GINConv(nn.Linear(3, 4)),
    "GATConv": lambda pyg: pyg.GATConv(3, 4, heads=2),
    "GATConv, no loops": lambda pyg: pyg.GATConv(3, 4, heads=2, add_self_loops=False),
    "GATv2Conv": lambda pyg: pyg.GATv2Conv(3, 4, heads=2),
    "TransformerConv": lambda pyg: pyg.TransformerConv(3, 4, heads=2),
    "SGConv": lambda pyg: pyg.SGConv(3, 4, K=2),
    "APPNP": lambda pyg: pyg.APPNP(3, 0.1),
    "TAGConv": lambda pyg: pyg.TAGConv(3, 4),
    "LGConv": lambda pyg: pyg.LGConv(),
    "LEConv": lambda pyg: pyg.LEConv(3, 4),
    "PNAConv": lambda pyg: pyg.PNAConv(3, 4, ["mean", "std"], ["identity"], torch.tensor([1, 2, 3])),
    "GCN model": lambda pyg: pyg.GCN(3, 4, 2, 4),
}


@pytest.mark.pyg
@pytest.mark.filterwarnings("ignore")
@LAYOUTS
@pytest.mark.parametrize("name", PYG_LAYERS)
def test_pyg_layer_with_adj_t(name: str, layout: torch.layout) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    layer = First(PYG_LAYERS[name](pyg)).double()
    program = captured(layer, adjacency(20, layout, 0)).module()
    parts, x = adjacency_parts(adjacency(33, layout, 1)), features(33)
    results = [
        program(x, parts.row, parts.col, parts.value.clone().requires_grad_(), torch.ones(33, dtype=torch.bool)),
        layer(x, adjacency(33, layout, 1)),
    ]
    torch.testing.assert_close(results[0], results[1])
    parameters = list(layer.parameters())
    if parameters:
        mine, theirs = (torch.autograd.grad(r.square().sum(), parameters, allow_unused=True) for r in results)
        torch.testing.assert_close(mine, theirs)
