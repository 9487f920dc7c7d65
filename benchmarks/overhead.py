"""What a step costs besides the operators themselves, on one process: a graph so small that nothing else takes time.

python benchmarks/overhead.py
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import sylvie_fx
from sylvie_fx.ir.ops import keep_mask
from sylvie_fx.runtime.machine import Machine


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(16, 32), GCNConv(32, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(F.dropout(F.relu(self.conv1(x, edge_index)), 0.5, self.training), edge_index)


def seconds(call: Any, times: int = 200) -> float:
    """Of one call, the best of three rounds."""
    for _ in range(5):
        call()
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter() - start) / times)
    return min(rounds)


class Timed:
    """Adds up what Machine.run takes."""

    def __init__(self) -> None:
        self.total, self.inner = 0.0, Machine.run

    def run(self, machine: Machine, *args: Any) -> Any:
        start = time.perf_counter()
        result = self.inner(machine, *args)
        self.total += time.perf_counter() - start
        return result


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, edge_index, y = torch.randn(200, 16), torch.randint(200, (2, 1000)), torch.randint(4, (200,))
    train = torch.rand(200) < 0.5
    original = GCN()
    model = sylvie_fx.distribute(copy.deepcopy(original))
    own = model.shard(x, edge_index, y, train)

    def step(net: Any, x: Any, edge_index: Any, y: Any, train: Any) -> None:
        net.zero_grad()
        F.cross_entropy(net(x, edge_index)[train], y[train]).backward()

    plain = seconds(lambda: step(original, x, edge_index, y, train))
    ours = seconds(lambda: step(model, *own))
    timed = Timed()
    Machine.run = lambda machine, *args: timed.run(machine, *args)  # type: ignore[method-assign]
    whole = seconds(lambda: F.cross_entropy(model(own[0], own[1])[own[3]], own[2][own[3]]), 200)
    calls = 3 * 200 + 5
    print(f"a training step: PyG {plain * 1e3:.2f} ms, sylvie_fx {ours * 1e3:.2f} ms")
    print(f"model and loss forward: {whole * 1e3:.2f} ms, of which the machine {timed.total / calls * 1e3:.2f} ms")
    keys = torch.arange(2708)
    mask, dropout = (
        seconds(lambda: keep_mask(keys, 1433, 0.5, 7), 5),
        seconds(lambda: F.dropout(torch.ones(2708, 1433)), 5),
    )
    print(f"a dropout mask of 2708 x 1433: {mask * 1e3:.1f} ms; F.dropout of as many entries {dropout * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
