"""Small models and the programs that the passes make of them, for tests of the exchange passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.passes.manager import PassManager
from sylvie_fx.runtime.in_process import InProcessGroup

NODES = 40


def graph(features: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NODES, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(NODES, (2, 200), generator=generator)


class Sum(nn.Module):
    """A linear layer, and the sum over incoming edges."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, out, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


class Attention(nn.Module):
    """Gathers a wide value and a score computed from it."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, out, dtype=torch.float64)
        self.score = nn.Parameter(torch.randn(out, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x)
        score = torch.sigmoid((h * self.score).sum(-1))
        messages = h[edge_index[0]] * score[edge_index[0]].unsqueeze(-1)
        return torch.zeros_like(h).index_add(0, edge_index[1], messages)


class BothWays(nn.Module):
    """Learned edge values that are added at both ends of an edge."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * features, out, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        e = torch.tanh(self.linear(torch.cat([x[source], x[target]], -1)))
        zeros = e.new_zeros(x.shape[0], e.shape[1])
        return zeros.index_add(0, target, e) - zeros.index_add(0, source, e)


class Stack(nn.Module):
    """Layers one behind the other, with ReLU and dropout between them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else F.dropout(F.relu(x), 0.3, self.training), edge_index)
        return x


def compiled(
    model: nn.Module, *data: Any, passes: PassManager | None = None, **options: Any
) -> sylvie_fx.DistributedModule:
    """The model, compiled for the first of two ranks."""
    transport = InProcessGroup(2, 5.0).transport(0)
    net = sylvie_fx.DistributedModule(
        model, sylvie_fx.Options(**options), passes or sylvie_fx.default_passes(), transport, ProgramCache()
    )
    from sylvie_fx.graphs.layout import RowLayout
    from sylvie_fx.graphs.sharded import ShardedGraph
    from sylvie_fx.sharding.context import ShardContext

    x, edge_index = data
    owner = torch.arange(len(x)) % 2
    context = ShardContext(ShardedGraph(RowLayout(owner, 2), 0), net.engine)
    net.compile_call(context.nodes(x, "x"), context.edge_index(edge_index, "edge_index"))
    return net


def lines(net: sylvie_fx.DistributedModule, *words: str, mode: str = "train") -> list[str]:
    """The main program's statements that contain any of some words, without comments."""
    text = str(net.program(mode)).split("main (", 1)[1].split("  return ", 1)[0]
    return [line.split("#")[0].strip() for line in text.splitlines() if any(w in line.split("#")[0] for w in words)]
