"""Accuracy of coded exchanges against float32: test accuracy at the best validation epoch, and the final training loss.

    python benchmarks/accuracy.py --quick               a few minutes
    python benchmarks/accuracy.py --write               the whole table, into docs/accuracy.md

float32 runs on one part: that k parts give the same loss and gradients is what the tests prove. Coded runs train on
ranks that are threads of this process, which gives the numbers that processes would give.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.graphs.datasets import GraphData, available, load_npz
from sylvie_fx.graphs.generators import block_model
from sylvie_fx.runtime.in_process import run_ranks

FEATURES = {"cora": "row", "citeseer": "row", "tolokers": "std"}


class Net(nn.Module):
    """Layers of one convolution with ReLU and dropout between them."""

    def __init__(self, convs: list[nn.Module], dropout: float, first: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.dropout, self.first = dropout, first

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.first, self.training)
        for i, conv in enumerate(self.convs):
            x = conv(x, edge_index)
            if i + 1 < len(self.convs):
                x = F.dropout(F.relu(x), self.dropout, self.training)
        return x


def make(name: str, graph: GraphData, hidden: int, layers: int, dropout: float, first: float) -> Net:
    """A network by name."""
    sizes = [graph.x.shape[1], *[hidden] * (layers - 1), graph.num_classes]
    convs: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        last = i + 1 == layers
        if name == "GCN":
            convs.append(GCNConv(a, b))
        elif name == "SAGE":
            convs.append(SAGEConv(a, b))
        elif name == "GAT":
            heads = 1 if last else 4
            convs.append(GATConv(a, b if last else b // 4, heads))
        else:
            convs.append(GINConv(nn.Sequential(nn.Linear(a, hidden), nn.ReLU(), nn.Linear(hidden, b)), train_eps=True))
    return Net(convs, dropout, first)


@dataclass(frozen=True)
class Setting:
    """One data set and how it is trained."""

    graph: Callable[[int], GraphData]
    hidden: int = 64
    layers: int = 2
    dropout: float = 0.5
    first: float = 0.0
    epochs: int = 100
    rate: float = 0.01
    decay: float = 0.0


def settings() -> dict[str, Setting]:
    """The data sets that are here, and the stress model."""
    found = {"block model": Setting(lambda seed: block_model(seed=seed), 64, 3, 0.0, 0.0, 100, 0.003)}
    for name in available():
        how = FEATURES.get(name, "l2")
        small = name in ("cora", "citeseer")
        found[name] = Setting(
            lambda seed, n=name, h=how: load_npz(n, h),  # type: ignore[misc]
            16 if small else 64, 2, 0.5 if small else 0.2, 0.5 if small else 0.0, 200 if small else 100, 0.01, 5e-4 if small else 0.0,
        )  # fmt: skip
    return found


def train(
    setting: Setting, model: str, seed: int, parts: int, partition: str, **options: object
) -> tuple[float, float]:
    """Test accuracy (per cent) at the best validation epoch, and the training loss of the last epoch."""
    graph = setting.graph(seed)
    torch.manual_seed(seed)
    original = make(model, graph, setting.hidden, setting.layers, setting.dropout, setting.first)
    state = {k: v.clone() for k, v in original.state_dict().items()}
    cache = ProgramCache()

    def rank(transport: sylvie_fx.runtime.transport.Transport) -> tuple[float, float]:
        own = make(model, graph, setting.hidden, setting.layers, setting.dropout, setting.first)
        own.load_state_dict(state)
        net = sylvie_fx.DistributedModule(
            own, sylvie_fx.Options(seed=seed, **options), sylvie_fx.default_passes(), transport, cache
        )
        x, edges, y, fit, val, test = net.shard(
            graph.x, graph.edge_index, graph.y, graph.train_mask, graph.val_mask, graph.test_mask, partition=partition
        )
        optimizer = torch.optim.Adam(net.parameters(), lr=setting.rate, weight_decay=setting.decay)
        target, best, found = y[fit], -1.0, 0.0
        for epoch in range(setting.epochs):
            net.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x, edges)[fit], target)
            loss.backward()
            optimizer.step()
            if epoch % 5 == 4:
                net.eval()
                with torch.no_grad():
                    right = net(x, edges).argmax(1) == y
                    score = right[val].float().mean().item()
                    if score > best:
                        best, found = score, right[test].float().mean().item()
        return 100 * found, loss.item()

    return run_ranks(parts, rank, 600.0)[0]


def interval(differences: list[float]) -> float:
    """Half the 95% interval of the mean of paired differences (Student's t)."""
    n = len(differences)
    if n < 2:
        return math.inf
    from scipy.stats import t

    return float(t.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n))


def row(
    name: str, setting: Setting, model: str, seeds: int, parts: int, partition: str, bits: int, variant: str
) -> str:
    """One line of the table."""
    start = time.perf_counter()
    exact = [train(setting, model, s, 1, "contiguous") for s in range(seeds)]
    coded = [train(setting, model, s, parts, partition, bits=bits, variant=variant) for s in range(seeds)]
    difference = [c[0] - e[0] for c, e in zip(coded, exact, strict=True)]
    mean = [statistics.mean(v[0] for v in runs) for runs in (exact, coded)]
    loss = [statistics.mean(v[1] for v in runs) for runs in (exact, coded)]
    spread = [statistics.pstdev([v[0] for v in runs]) for runs in (exact, coded)]
    delta, half = statistics.mean(difference), interval(difference)
    verdict = "yes" if delta >= -0.2 or abs(delta) <= half else "no"
    return (
        f"| {name} | {model} | {parts} {partition} | {bits} {variant} | {mean[0]:.2f} ± {spread[0]:.2f} | {mean[1]:.2f} ± {spread[1]:.2f} "
        f"| {delta:+.2f} ± {half:.2f} | {verdict} | {loss[0]:.3f} | {loss[1]:.3f} | {time.perf_counter() - start:.0f} |"
    )


HEADER = (
    "| data | model | parts | code | float32 | coded | difference, 95% | holds | loss float32 | loss coded | seconds |\n"
    "| --- | --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, the block model and Cora")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.md")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--data", nargs="*", help="names of data sets")
    parser.add_argument("--models", nargs="*", default=["GCN", "SAGE", "GAT", "GIN"])
    parser.add_argument("--parts", nargs="*", default=["4 metis", "8 metis", "8 random"])
    parser.add_argument("--codes", nargs="*", default=["1 shift"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.seeds, arguments.data, arguments.parts = 2, ["block model", "cora"], ["8 random"]
    known = settings()
    lines = [HEADER]
    print(HEADER, flush=True)
    for name in arguments.data or known:
        models = ["SAGE"] if name == "block model" else arguments.models
        for model in models:
            for where in ["8 random"] if name == "block model" else arguments.parts:
                for code in arguments.codes:
                    parts, partition = where.split()
                    bits, variant = code.split()
                    line = row(name, known[name], model, arguments.seeds, int(parts), partition, int(bits), variant)
                    lines.append(line)
                    print(line, flush=True)
    if arguments.write:
        target = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
        target.write_text("# Accuracy of one-bit exchanges\n\n" + (__doc__ or "") + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
