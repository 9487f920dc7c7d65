"""Layers of a user's script that stand behind the distributed model train as they do on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

NODES = 19
CACHE = ProgramCache()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x)
        return h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


def frozen(norm: nn.Module) -> nn.Module:
    for name, buffer in norm.named_buffers():
        if name.startswith("running"):
            buffer.uniform_(0.5, 1.5)
    return norm.eval()


HEADS: dict[str, Callable[[], nn.Module]] = {
    "frozen batch norm": lambda: frozen(nn.BatchNorm1d(5)),
    "frozen batch norm without weights": lambda: frozen(nn.BatchNorm1d(5, affine=False)),
    "batch norm that trains": lambda: nn.BatchNorm1d(5, track_running_stats=False),
    "batch norm with statistics": lambda: nn.BatchNorm1d(5, momentum=0.3),
    "layer norm": lambda: nn.LayerNorm(5),
    "linear": lambda: nn.Sequential(nn.Linear(5, 5), nn.PReLU(), nn.Linear(5, 3)),
    "frozen linear": lambda: nn.Linear(5, 3).requires_grad_(False),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_outside_the_model(name: str) -> None:
    torch.manual_seed(0)
    model, head = Model().double(), HEADS[name]().double()
    x, y = torch.randn(NODES, 4).double(), torch.randint(0, 3, (NODES,))
    edges, mask = torch.randint(0, NODES, (2, 60)), torch.arange(NODES) % 2 == 0

    def step(model: Any, x: Any, edges: Any, y: Any, mask: Any) -> list[Tensor]:
        own = copy.deepcopy(head)
        loss = F.cross_entropy(own(model(x, edges))[mask], y[mask])
        loss.backward()
        learned = [p for p in (*model.parameters(), *own.parameters()) if p.requires_grad]
        return [loss.detach(), *[p.grad for p in learned if p.grad is not None], *own.buffers()]

    def rank(transport: Any) -> list[Tensor]:
        distributed = DistributedModule(copy.deepcopy(model), Options(timeout=60), default_passes(), transport, CACHE)
        return step(distributed, *distributed.shard(x, edges, y, mask, partition="random"))

    expected = step(copy.deepcopy(model), x, edges, y, mask)
    for found in run_ranks(3, rank, 60):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
