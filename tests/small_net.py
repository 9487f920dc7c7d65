"""A small model and graph, and ranks in one process that run something on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks


class Net(nn.Module):
    """Two layers that add neighbours."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in (self.one, self.two):
            h = layer(x).tanh()
            x = h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return x


def data(nodes: int = 12, edges: int = 40) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    x, edge_index = torch.randn(nodes, 4, generator=g), torch.randint(0, max(nodes, 1), (2, edges), generator=g)
    return [x, edge_index, torch.randint(0, 3, (nodes,), generator=g), torch.rand(nodes, generator=g) < 0.5]


def on_ranks(parts: int, fn: Callable[[Any], Any], model: nn.Module | None = None) -> list[Any]:
    cache = ProgramCache()
    torch.manual_seed(0)
    model = model or Net()

    def rank(transport: Any) -> Any:
        return fn(DistributedModule(copy.deepcopy(model), Options(timeout=20), default_passes(), transport, cache))

    return run_ranks(parts, rank, 20)


KINDS = ["node", "edge_index", "node", "node"]
