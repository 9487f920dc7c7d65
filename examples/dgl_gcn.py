"""A two-layer GCN in DGL on a real graph: an ordinary one-device script; the lines marked (*) distribute it."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx.dgl  # (*) makes DGL importable beside a current torch

import dgl  # isort: skip
from dgl.nn import GraphConv

from sylvie_fx.graphs.datasets import demo_graph


class GCN(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv1 = GraphConv(features, hidden)
        self.conv2 = GraphConv(hidden, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = F.relu(self.conv1(graph, x))
        return self.conv2(graph, self.dropout(h))


def build() -> tuple[nn.Module, tuple[Any, ...], object]:
    """What `python -m sylvie_fx verify` and `explain` look at: the model, what shard() takes, and the loss."""
    torch.manual_seed(0)
    data = demo_graph()
    graph = dgl.add_self_loop(dgl.graph((data.edge_index[0], data.edge_index[1]), num_nodes=len(data.y)))
    graph.ndata["feat"], graph.ndata["label"] = data.x, data.y
    graph.ndata["train"], graph.ndata["test"] = data.train_mask, data.test_mask
    return GCN(data.x.shape[1], 16, data.num_classes), (graph,), loss


def loss(model: nn.Module, graph: Any) -> Tensor:
    train = graph.ndata["train"]
    return F.cross_entropy(model(graph, graph.ndata["feat"])[train], graph.ndata["label"][train])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, default=32, help="bits a number on the wire: 1, 2, 4, 8, 16 or 32")
    bits = parser.parse_args().bits
    model, (graph,), _ = build()
    model = sylvie_fx.distribute(model, bits=bits)  # (*)
    graph = model.shard(graph)  # (*)
    label, test = graph.ndata["label"], graph.ndata["test"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 51):
        model.train()
        optimizer.zero_grad()
        value = loss(model, graph)
        value.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(graph, graph.ndata["feat"])[test].argmax(1) == label[test]).float().mean()
        found = f"epoch {epoch:3d}  loss {value.item():.6f}  test accuracy {accuracy.item():.4f}"
        print(f"{found}  sent {model.stats.bytes_sent:,} bytes", flush=True)
        model.reset_stats()


if __name__ == "__main__":
    main()
