"""Exchanges in two halves give the bits of whole ones, in the main thread and in threads of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks

NODES = 90
WHOLE = sylvie_fx.default_passes().without("split-exchanges", "schedule", "bucket-gradients")


class Net(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(6, 8), layer(8, 8), layer(8, 3)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = torch.dropout(self.layers[0](x, edge_index).relu(), 0.2, self.training)
        return self.layers[2](self.norm(self.layers[1](x, edge_index)).relu(), edge_index)


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "GCN": GCNConv,
    "SAGE mean": SAGEConv,
    "SAGE max": lambda a, b: SAGEConv(a, b, aggr="max"),
    "GIN": lambda a, b: GINConv(nn.Linear(a, b)),
    "GAT": GATConv,
}


def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(NODES, 6, generator=generator), torch.randint(NODES, (2, 500), generator=generator)


def train(net: nn.Module, passes: sylvie_fx.PassManager, threaded: bool, **options: Any) -> list[Tensor]:
    """The losses of six steps and the last gradients, of every rank."""
    cache = ProgramCache()

    def rank(transport: InProcessTransport) -> Tensor:
        transport.threaded = threaded
        model = sylvie_fx.DistributedModule(copy.deepcopy(net), sylvie_fx.Options(**options), passes, transport, cache)
        x, edges = model.shard(*graph(), partition="random")
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = (model(x, edges) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().reshape(1))
        assert passes is WHOLE or "halo_start" in str(model.program("train"))
        return torch.cat([*losses, *(p.grad.flatten() for p in model.parameters())])

    return run_ranks(3, rank, 60.0)


@pytest.mark.parametrize("bits", [32, 1])
@pytest.mark.parametrize("name", MODELS)
def test_the_schedule_changes_no_bit(name: str, bits: int) -> None:
    torch.manual_seed(0)
    net = Net(MODELS[name])
    expected = train(net, WHOLE, threaded=False, bits=bits)
    assert torch.isfinite(expected[0]).all()
    for threaded in (False, True):
        found = train(net, sylvie_fx.default_passes(), threaded, bits=bits)
        for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), f"rank {rank}, threads {threaded}"
