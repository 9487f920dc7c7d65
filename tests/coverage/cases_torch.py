"""Ways to write graph layers in plain PyTorch: one small model for each spelling or idea."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from coverage_cases import NODES, Case, edge_features, edges, features, types
from torch import Tensor, nn

NOT_TRIED: dict[str, str] = {}

CASES: list[Case] = []


class Layer(nn.Module):
    """Two linear layers, a table and a vector, and a function that uses them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.table = nn.Parameter(torch.randn(3, 8))
        self.vector = nn.Parameter(torch.randn(8))
        self.cell, self.norm = nn.GRUCell(8, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm, self.bag = nn.LSTM(8, 8, batch_first=True), nn.EmbeddingBag(60, 8, mode="sum")

    def forward(self, *data: Tensor) -> Any:
        return self.function(self, *data)


def case(
    *more: Callable[[], Any], refusal: str | None = None, steps: int = 1
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function ``(layer, x, edge_index, ...)`` as a case."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def build() -> tuple[nn.Module, tuple[Any, ...]]:
            return Layer(function), (features(), edges(), *(m() for m in more))

        CASES.append(Case("torch", function.__name__.replace("_", " "), build, refusal, steps))
        return function

    return register


def mask_of_nodes() -> Tensor:
    return torch.arange(NODES) % 3 == 0


def labels_of_nodes() -> Tensor:
    return types(4, NODES)


def _weights() -> Tensor:
    return edge_features()


def _relations() -> Tensor:
    return types(3)


def ids_of_nodes() -> Tensor:
    return torch.arange(NODES)


def spread(x: Tensor, edge_index: Tensor) -> Tensor:
    """Sum over in-neighbours."""
    return torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])


@case()
def index_add(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(spread(m.a(x), e))


@case()
def index_add_in_place(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    out = x.new_zeros(x.size(0), 8)
    out.index_add_(0, e[1], m.a(x)[e[0]])
    return m.b(out)


@case()
def index_put_accumulate(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 8, dtype=x.dtype)
    out.index_put_((e[1],), m.a(x)[e[0]], accumulate=True)
    return m.b(out)


@case()
def scatter_reduce_amax_include_self(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.scatter_reduce(0, e[1].view(-1, 1).expand(-1, 8), h[e[0]], "amax"))


@case()
def scatter_reduce_mean(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.zeros_like(h).scatter_reduce(0, e[1][:, None].repeat(1, 8), h[e[0]], "mean", include_self=False))


@case()
def one_dimensional_messages(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.b(x).sum(1)
    return torch.zeros(x.size(0)).scatter_add(0, e[1], h[e[0]])


@case()
def degree_by_bincount(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    degree = torch.bincount(e[1], minlength=x.size(0)).clamp(min=1)
    return m.b(spread(m.a(x), e) / degree.unsqueeze(-1))


@case()
def degree_as_feature(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    degree = torch.zeros(x.size(0), dtype=torch.long).index_add(0, e[1], torch.ones_like(e[1]))
    return m.b(m.a(x) + F.one_hot(degree.clamp(max=7), 8).to(x.dtype))


@case()
def zero_degree_branch(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    degree = torch.bincount(e[1], minlength=x.size(0))
    h = spread(m.a(x), e)
    if (degree == 0).any():
        h = torch.where((degree == 0)[:, None], m.vector, h)
    return m.b(h)


@case(_relations)
def loop_over_relations(m: Layer, x: Tensor, e: Tensor, kind: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for relation in range(int(kind.max()) + 1):
        chosen = kind == relation
        if not chosen.any():
            continue
        out = out + spread(x * m.table[relation], e[:, chosen])
    return m.b(out)


@case(_relations)
def loop_over_unique(m: Layer, x: Tensor, e: Tensor, kind: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for relation in kind.unique().tolist():
        out = out + spread(x * m.table[relation], e[:, kind == relation])
    return m.b(out)


@case(_relations)
def table_by_type(m: Layer, x: Tensor, e: Tensor, kind: Tensor) -> Tensor:
    return m.b(torch.zeros_like(x).index_add(0, e[1], x[e[0]] * m.table[kind]))


@case()
def degree_buckets(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    degree = torch.bincount(e[1], minlength=x.size(0))
    out = torch.zeros_like(x)
    for d in degree.unique():
        nodes = (degree == d).nonzero().view(-1)
        out[nodes] = m.a(x[nodes]) * (d + 1)
    return m.b(out)


@case()
def edge_softmax(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    score = F.leaky_relu((h[e[0]] * m.vector).sum(-1) + (h[e[1]] * m.vector).sum(-1))
    top = torch.full((x.size(0),), -math.inf).scatter_reduce(0, e[1], score, "amax")
    weight = (score - top[e[1]]).exp()
    total = torch.zeros(x.size(0)).index_add(0, e[1], weight)
    return m.b(torch.zeros_like(h).index_add(0, e[1], h[e[0]] * (weight / total[e[1]])[:, None]))


@case()
def global_max_shift(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    score = (h[e[0]] * h[e[1]]).sum(-1)
    weight = (score - score.max()).exp()
    total = torch.zeros(x.size(0)).index_add(0, e[1], weight)
    return m.b(torch.zeros_like(h).index_add(0, e[1], h[e[0]] * (weight / (total[e[1]] + 1e-9))[:, None]))


@case()
def both_directions(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.cat([spread(h, e), spread(h, e.flip(0))], 1)[:, ::2])


@case()
def learned_edges_in_both_directions(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    gate = torch.sigmoid(h[e[0]] + h[e[1]])
    out = torch.zeros_like(h).index_add(0, e[1], gate * h[e[0]])
    back = torch.zeros_like(h).index_add(0, e[0], gate * h[e[1]])
    return m.b(out + back)


@case()
def edges_from_edges(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    edge = h[e[0]] - h[e[1]]
    for _ in range(2):
        node = torch.zeros_like(h).index_add(0, e[1], edge)
        edge = edge + torch.tanh(node[e[0]]) - edge.mean(0)
    return m.b(node)


@case()
def undirected_by_cat(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(spread(m.a(x), torch.cat([e, e.flip(0)], dim=1)))


@case(_weights)
def weights_and_self_loops(m: Layer, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
    every = torch.arange(x.size(0))
    row, col = torch.cat([e[0], every]), torch.cat([e[1], every])
    weight = torch.cat([weight, torch.ones(x.size(0))])
    degree = torch.zeros(x.size(0)).index_add(0, col, weight)
    norm = degree.pow(-0.5)[row] * weight * degree.pow(-0.5)[col]
    return m.b(torch.zeros_like(x).index_add(0, col, m.a(x)[row] * norm[:, None]))


@case()
def coalesced_by_unique(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    pair, count = torch.unique(e, dim=1, return_counts=True)
    return m.b(torch.zeros_like(x).index_add(0, pair[1], m.a(x)[pair[0]] / count[:, None]))


@case()
def sorted_by_destination(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    order = torch.argsort(e[1], stable=True)
    return m.b(spread(m.a(x), e[:, order]))


@case()
def segment_reduce(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    order = torch.argsort(e[1], stable=True)
    lengths = torch.bincount(e[1], minlength=x.size(0))
    return m.b(torch.segment_reduce(m.a(x)[e[0][order]], "sum", lengths=lengths, unsafe=True))


@case(refusal="works along the dimension that is spread")
def cumulative_sum_over_sorted_edges(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    order = torch.argsort(e[1], stable=True)
    lengths = torch.bincount(e[1], minlength=x.size(0))
    end = lengths.cumsum(0)
    running = torch.cat([torch.zeros(1, 8), m.a(x)[e[0][order]].cumsum(0)])
    return m.b(running[end] - running[end - lengths])


@case()
def sparse_product(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    adjacency = torch.sparse_coo_tensor(e.flip(0), torch.ones(e.size(1)), (x.size(0), x.size(0)))
    return m.b(torch.sparse.mm(adjacency, m.a(x)))


@case()
def two_hops_in_one_layer(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h + 0.5 * spread(h, e) + 0.25 * spread(spread(h, e), e))


@case()
def chebyshev_on_the_rank(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    degree = torch.bincount(e[1], minlength=x.size(0)).to(x.dtype)
    before, now = x, spread(x, e) / degree.clamp(min=1)[:, None]
    for _ in range(2):
        before, now = now, 2 * spread(now, e) / degree.max() - before
    return m.b(m.a(now) + before)
