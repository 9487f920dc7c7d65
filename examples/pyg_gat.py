"""A two-layer GAT in PyG on a real graph: an ordinary one-device script; the lines marked (*) distribute it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import sylvie_fx
from sylvie_fx.graphs.datasets import demo_graph


class GAT(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int, heads: int = 4, dropout: float = 0.6) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = GATConv(features, hidden, heads, dropout=dropout)
        self.conv2 = GATConv(hidden * heads, classes, heads=1, concat=False, dropout=dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


def build() -> tuple[nn.Module, tuple[Tensor, ...], object]:
    """What `python -m sylvie_fx verify` and `explain` look at: the model, what shard() takes, and the loss."""
    torch.manual_seed(0)
    graph = demo_graph()
    model = GAT(graph.x.shape[1], 8, graph.num_classes)
    return model, (graph.x, graph.edge_index, graph.y, graph.train_mask, graph.test_mask), loss


def loss(model: nn.Module, x: Tensor, edge_index: Tensor, y: Tensor, train: Tensor, test: Tensor) -> Tensor:
    return F.cross_entropy(model(x, edge_index)[train], y[train])


def main() -> None:
    model, data, _ = build()
    model = sylvie_fx.distribute(model)  # (*)
    data = model.shard(*data)  # (*)
    x, edge_index, y, _, test = data
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    for epoch in range(1, 101):
        model.train()
        optimizer.zero_grad()
        value = loss(model, *data)
        value.backward()
        optimizer.step()
        if epoch % 10 == 0:
            model.eval()
            with torch.no_grad():
                accuracy = (model(x, edge_index)[test].argmax(1) == y[test]).float().mean()
            print(f"epoch {epoch:3d}  loss {value.item():.6f}  test accuracy {accuracy.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
