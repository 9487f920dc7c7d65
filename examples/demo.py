"""Train a GCN on a real graph twice: unmodified on one device, and distributed over processes; show both side by side.

python examples/demo.py [--parts 2] [--bits 32] [--epochs 60]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

import sylvie_fx
from sylvie_fx.graphs.datasets import GraphData, demo_graph
from sylvie_fx.runtime.launch import Launch, launch


class GCN(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(features, 16), GCNConv(16, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)


def train(model: nn.Module, data: tuple[Tensor, ...], epochs: int) -> dict[str, Any]:
    """The same lines train the original and the distributed model."""
    x, edge_index, y, train_mask, test_mask = data
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    losses = []
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, edge_index)[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        accuracy = (model(x, edge_index)[test_mask].argmax(1) == y[test_mask]).float().mean()
    return {"losses": losses, "accuracy": accuracy.item()}


def make(graph: GraphData) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = GCN(graph.x.shape[1], graph.num_classes)
    return model, (graph.x, graph.edge_index, graph.y, graph.train_mask, graph.test_mask)


def worker(bits: int, epochs: int, result: Path) -> None:
    """What each process runs."""
    original, whole = make(demo_graph())
    model = sylvie_fx.distribute(original, bits=bits)
    found = train(model, model.shard(*whole), epochs)
    if model.transport.rank == 0:
        result.write_text(json.dumps({**found, "table": model.explain("train")}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.bits, options.epochs, options.worker)
        return 0
    graph = demo_graph()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = ["--worker", str(result), "--bits", str(options.bits), "--epochs", str(options.epochs)]
        done = launch(Launch(Path(__file__), arguments, options.parts))
        if done.exitcode:
            return done.exitcode
        spread = json.loads(result.read_text())
    single = train(*make(graph), options.epochs)
    table = Table(title=f"GCN on {graph.name}: training loss", title_justify="left")
    for name in ("epoch", "one device, unmodified", f"{options.parts} processes", "difference"):
        table.add_column(name, justify="right")
    pairs = list(zip(single["losses"], spread["losses"], strict=True))
    for epoch in range(0, options.epochs, max(options.epochs // 12, 1)):
        a, b = pairs[epoch]
        table.add_row(str(epoch + 1), f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}")
    console = Console()
    console.print(table)
    largest = max(abs(a - b) for a, b in pairs)
    console.print(f"largest difference over {options.epochs} epochs: {largest:.1e}")
    console.print(
        f"test accuracy: {single['accuracy']:.4f} on one device, {spread['accuracy']:.4f} on {options.parts} processes"
    )
    print(spread["table"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
