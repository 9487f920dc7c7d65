"""Accuracy of coded exchanges against float32: test accuracy at the best validation epoch, and the final training loss.

    python benchmarks/accuracy.py --quick               a few minutes; two seeds of the block model and Cora
    python benchmarks/accuracy.py                       what is missing of the whole table: hours
    python benchmarks/accuracy.py --seeds 0             docs/accuracy.md again from the runs that are there

Every run is a line of docs/accuracy.csv. Runs that are there are not repeated, so the command can be stopped and started
at any time; after each row it writes docs/accuracy.md. float32 runs on one part: that k parts give the same loss and
gradients is what the tests prove. Coded runs train on ranks that are threads of this process, which gives the numbers
that processes would give.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accuracy_table import Results, Run, markdown
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.graphs.datasets import GraphData, available, load_npz
from sylvie_fx.graphs.generators import block_model
from sylvie_fx.graphs.partition import partition_nodes
from sylvie_fx.runtime.in_process import run_ranks

DOCS = Path(__file__).resolve().parents[1] / "docs"
ORDER = ("block model", "cora", "citeseer", "amazon_photo", "amazon_computers", "tolokers", "facebook_pages",
         "coauthor_cs", "wordnet", "coauthor_physics")  # fmt: skip
STRESS = ("block model", "SAGE", "8 random")
"""Of the block model, this one model and partition."""
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
    """A network by name.

    GIN sums neighbours, and on graphs of a high degree float32 alone loses it: there it has the batch normalisation of its paper.
    """
    mean_degree = graph.edge_index.shape[1] / graph.num_nodes
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
            norm = [nn.BatchNorm1d(hidden)] if mean_degree > 10 else []
            perceptron = nn.Sequential(nn.Linear(a, hidden), *norm, nn.ReLU(), nn.Linear(hidden, b))
            convs.append(GINConv(perceptron, train_eps=True))
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


@functools.lru_cache(maxsize=1)
def real_graph(name: str, width: int | None) -> GraphData:
    """A data set; with a width, its features are projected at random to so many: most of the work of a wide one is its
    first linear layer, which does not cross, and which both sides of the comparison share."""
    graph = load_npz(name, FEATURES.get(name, "l2"))
    if width is None:
        return graph
    generator = torch.Generator().manual_seed(0)
    return replace(graph, x=graph.x @ (torch.randn(graph.x.shape[1], width, generator=generator) / width**0.5))


def settings() -> dict[str, Setting]:
    """The data sets that are here, and the stress model."""
    found = {"block model": Setting(lambda seed: block_model(seed=seed), 64, 3, 0.0, 0.0, 100, 0.003)}
    here = available()
    for name in (n for n in ORDER if n in here):
        large = ORDER.index(name) >= ORDER.index("facebook_pages")
        width = 256 if large else None
        if name in ("cora", "citeseer"):
            how = Setting(block_model, 16, 2, 0.5, 0.5, 200, 0.01, 5e-4)
        else:
            how = Setting(block_model, 64, 2, 0.2, 0.0, 60 if large else 100, 0.01)
        found[name] = replace(how, graph=lambda seed, n=name, w=width: real_graph(n, w))  # type: ignore[misc]
    return found


def train(
    setting: Setting, model: str, seed: int, parts: int, partition: str, cache: ProgramCache, **options: object
) -> tuple[float, float]:
    """Test accuracy (per cent) at the best validation epoch, and the training loss of the last epoch.

    The cache may hold the programs of runs of the same data set, model and options, with other seeds.
    """
    graph = setting.graph(seed)
    assignment = partition_nodes(graph.num_nodes, *graph.edge_index, parts, partition, seed)
    torch.manual_seed(seed)
    original = make(model, graph, setting.hidden, setting.layers, setting.dropout, setting.first)
    state = {k: v.clone() for k, v in original.state_dict().items()}

    def rank(transport: sylvie_fx.runtime.transport.Transport) -> tuple[float, float]:
        own = make(model, graph, setting.hidden, setting.layers, setting.dropout, setting.first)
        own.load_state_dict(state)
        net = sylvie_fx.DistributedModule(
            own, sylvie_fx.Options(seed=seed, **options), sylvie_fx.default_passes(), transport, cache
        )
        x, edges, y, fit, val, test = net.shard(
            graph.x, graph.edge_index, graph.y, graph.train_mask, graph.val_mask, graph.test_mask, partition=assignment
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


def row(results: Results, name: str, setting: Setting, model: str, where: str, code: str, seeds: int) -> None:
    """Make the runs that one line of the table still misses.

    ``code`` is "32", or a width and a variant, which a staleness may follow, and "cold": without the steps of more bits at
    the beginning.
    """
    parts, partition = where.split()
    bits, *rest = code.split()
    options: dict[str, object] = {"bits": int(bits)}
    if rest:
        options |= {"variant": rest[0], "gradients": rest[0]}
    if "cold" in rest:
        rest.remove("cold")
        options["warm_up"] = 1
    if rest[1:]:
        options["staleness"] = "auto" if rest[1] == "auto" else int(rest[1])
    cache = ProgramCache()
    for seed in range(seeds):
        run = Run(name, model, where, code, setting.epochs, seed)
        if run in results:
            continue
        start = time.perf_counter()
        accuracy, loss = train(setting, model, seed, int(parts), partition, cache, **options)
        results.add(run, accuracy, loss, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds, the block model and Cora")
    parser.add_argument("--results", type=Path, default=DOCS / "accuracy.csv", help="file of runs")
    parser.add_argument("--table", type=Path, default=DOCS / "accuracy.md", help="file of the table")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--data", nargs="*", help="names of data sets")
    parser.add_argument("--models", nargs="*", default=["GCN", "SAGE", "GAT", "GIN"])
    parser.add_argument("--parts", nargs="*", default=["4 metis", "8 metis", "8 random"])
    parser.add_argument(
        "--codes",
        nargs="*",
        default=["1 shift"],
        help="compared with float32: bits, what is coded, staleness and cold, as in '1 shift auto'",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.seeds, arguments.data, arguments.parts = 2, ["block model", "cora"], ["8 random"]
    known, results = settings(), Results(arguments.results)
    for name in arguments.data or known:
        for model in [STRESS[1]] if name == STRESS[0] else arguments.models:
            row(results, name, known[name], model, "1 contiguous", "32", arguments.seeds)
            for where in [STRESS[2]] if name == STRESS[0] else arguments.parts:
                for code in arguments.codes:
                    row(results, name, known[name], model, where, code, arguments.seeds)
                    arguments.table.write_text(markdown(results, ORDER))


if __name__ == "__main__":
    main()
