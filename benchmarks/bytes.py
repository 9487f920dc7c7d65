"""Bytes of a training step, counted at the transport: exchanges at the gather, and at the minimum cut.

    python benchmarks/bytes.py [--parts 4] [--hidden 256]

The steps of the warm-up are left out: inputs cross in the first once, coding starts with exact rows, and goes on with 4 bits. Gradient
synchronisation and other all_reduces are counted apart.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import APPNP, GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.graphs.generators import power_law_graph
from sylvie_fx.runtime.in_process import run_ranks


class Stack(nn.Module):
    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for i, conv in enumerate(self.convs):
            x = conv(x if i == 0 else F.relu(x), edge_index)
        return x


class Propagation(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second, self.propagate = nn.Linear(features, hidden), nn.Linear(hidden, classes), APPNP(5, 0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(self.second(F.relu(self.first(x))), edge_index)


def models(features: int, hidden: int, classes: int) -> dict[str, Callable[[], nn.Module]]:
    def layers(conv: Callable[[int, int], nn.Module], *sizes: int) -> Callable[[], nn.Module]:
        return lambda: Stack(*(conv(a, b) for a, b in itertools.pairwise(sizes)))

    def gin(a: int, b: int) -> nn.Module:
        return GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b)))

    shape = (features, hidden, classes)
    return {
        "GCN": layers(GCNConv, *shape),
        "SAGE mean": layers(SAGEConv, *shape),
        "SAGE pool": layers(lambda a, b: SAGEConv(a, b, aggr="max", project=True), *shape),
        "GAT": layers(lambda a, b: GATConv(a, b // 4, 4) if b == hidden else GATConv(a, b), *shape),
        "GATv2": layers(lambda a, b: GATv2Conv(a, b // 4, 4) if b == hidden else GATv2Conv(a, b), *shape),
        "GIN": layers(gin, *shape),
        "APPNP": lambda: Propagation(*shape),
        "GCN, 256 throughout": layers(GCNConv, features, 256, 256, 256),
        "GCN, 3 layers": layers(GCNConv, features, hidden, hidden, classes),
        "GCN, 8 layers": layers(GCNConv, features, *[hidden] * 7, classes),
        "GCN, wide to narrow": layers(GCNConv, features, 512, 128, 32, classes),
        "GCN, narrow to wide": layers(GCNConv, features, 16, 64, 256, classes),
    }


def count(make: Callable[[], nn.Module], parts: int, naive: bool, bits: int) -> tuple[int, int]:
    """Bytes that all ranks send in the first step behind the warm-up: in exchanges, and in all."""
    graph = power_law_graph(2000, 8000, 128, 16)
    cache, pipeline = ProgramCache(), sylvie_fx.default_passes()
    torch.manual_seed(0)
    model = make()
    if naive:
        pipeline = pipeline.without("place-halos")

    def rank(transport: sylvie_fx.runtime.transport.Transport) -> tuple[int, int]:
        sent = [0]
        plain = transport.exchange

        def counted(sends: list[Tensor | None], receives: list[Tensor | None], label: str) -> object:
            if " exchange " in label:  # an all_reduce is made of exchanges too, under labels of its own
                sent[0] += sum(t.numel() * t.element_size() for t in sends if t is not None)
            return plain(sends, receives, label)

        transport.exchange = counted  # type: ignore[method-assign,assignment]
        net = sylvie_fx.DistributedModule(
            copy.deepcopy(model), sylvie_fx.Options(bits=bits), pipeline, transport, cache
        )
        x, edges, y = net.shard(graph.x, graph.edge_index, graph.y)
        for _ in range(net.options.warm_up + 1):
            before = sent[0], transport.bytes_sent
            F.cross_entropy(net(x, edges), y).backward()
        return sent[0] - before[0], transport.bytes_sent - before[1]

    found = run_ranks(parts, rank, 120.0)
    return sum(f[0] for f in found), sum(f[1] for f in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| model | at the gather, float32 | minimum cut, float32 | at the gather, 1 bit | minimum cut, 1 bit | cut / gather | 1 bit / float32, at the gather |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, make in models(128, arguments.hidden, 16).items():
        cells = [count(make, arguments.parts, naive, bits)[0] for bits in (32, 1) for naive in (True, False)]
        naive, cut, naive_one, cut_one = cells
        saved = f"1/{naive / naive_one:.1f}"
        print(
            f"| {name} | {naive:,} | {cut:,} | {naive_one:,} | {cut_one:,} | {cut / naive:.2f}, {cut_one / naive_one:.2f} | {saved} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
