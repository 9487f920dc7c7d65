"""GraphSAGE in plain torch on a sparse adjacency: a one-device script; the lines marked (*) distribute it."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.graphs.datasets import demo_graph


class SAGE(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(sizes))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.neighbours = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = torch.sparse.sum(adjacency, dim=1).to_dense().clamp(min=1).unsqueeze(1)
        for own, neighbours in zip(self.own, self.neighbours, strict=True):
            x = own(x) + neighbours(adjacency @ x / degree)
            if own is not self.own[-1]:
                x = F.dropout(F.relu(x), 0.5, self.training)
        return x


def build() -> tuple[nn.Module, tuple[Tensor, ...], object]:
    """What `python -m sylvie_fx verify` and `explain` look at: the model, what shard() takes, and the loss."""
    torch.manual_seed(0)
    graph = demo_graph()
    n = len(graph.y)
    source, target = graph.edge_index
    values = torch.ones(graph.edge_index.shape[1])
    adjacency = torch.sparse_coo_tensor(torch.stack([target, source]), values, (n, n), check_invariants=True).coalesce()
    model = SAGE([graph.x.shape[1], 16, graph.num_classes])
    return model, (graph.x, adjacency, graph.y, graph.train_mask, graph.test_mask), loss


def loss(model: nn.Module, x: Tensor, adjacency: Tensor, y: Tensor, train: Tensor, test: Tensor) -> Tensor:
    return F.cross_entropy(model(x, adjacency)[train], y[train])


def main() -> None:
    model, data, _ = build()
    model = sylvie_fx.distribute(model)  # (*)
    data = model.shard(*data)  # (*)
    x, adjacency, y, _, test = data
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 51):
        model.train()
        optimizer.zero_grad()
        value = loss(model, *data)
        value.backward()
        optimizer.step()
        if epoch % 10 == 0:
            model.eval()
            with torch.no_grad():
                accuracy = (model(x, adjacency)[test].argmax(1) == y[test]).float().mean()
            print(f"epoch {epoch:3d}  loss {value.item():.6f}  test accuracy {accuracy.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
