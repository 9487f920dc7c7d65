"""Normalisations and readouts of PyTorch Geometric, the models of basic_gnn, and models as users write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from cases_pyg import D, case, degrees
from coverage_cases import NODES, edge_features, types
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import degree, get_laplacian, scatter, to_undirected


class _Normalised(nn.Module):
    """A convolution, a normalisation over nodes, and a convolution."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.a, self.norm, self.b = pyg.GCNConv(D, 8), norm, pyg.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, *rest: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x, edge_index), *rest).relu(), edge_index)


class _Messages(nn.Module):
    """MessageNorm scales messages by the norm of features."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.lin = norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.lin(x))


class _Pooled(nn.Module):
    """A readout of the whole graph."""

    def __init__(self, pool: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.pool, self.out = pyg.GCNConv(D, 8), pool, nn.LazyLinear(3)
        self.out(torch.zeros(1, 8))

    def forward(self, x: Tensor, edge_index: Tensor, *batch: Tensor) -> Tensor:
        return self.out(self.pool(self.conv(x, edge_index).relu(), *(batch or (None,))))


def _batch() -> Tensor:
    return torch.zeros(60, dtype=torch.int64)


class _VirtualNode(nn.Module):
    """A node of each graph that all its nodes talk to."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Embedding(1, D)
        self.convs = nn.ModuleList([pyg.GCNConv(D, D) for _ in range(2)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(D) for _ in range(2)])
        self.update = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, D))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        virtual = self.start(torch.zeros(int(batch[-1].item()) + 1, dtype=torch.long))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = x + virtual[batch]
            x = F.dropout(norm(conv(h, edge_index)).relu(), 0.3, training=self.training)
            virtual = virtual + self.update(pyg.global_add_pool(h, batch) + virtual)
        return pyg.global_mean_pool(x, batch)


class _PairScores(nn.Module):
    """Scores of given pairs of nodes: link prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.GCNConv(D, 8), pyg.GCNConv(8, 4)

    def forward(self, x: Tensor, edge_index: Tensor, pairs: Tensor) -> Tensor:
        z = self.two(self.one(x, edge_index).relu(), edge_index)
        return (z[pairs[0]] * z[pairs[1]]).sum(dim=-1)


class _Autoencoder(nn.Module):
    """The reconstruction loss of a graph autoencoder, with given negative pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = pyg.GAE(pyg.GCNConv(D, 4))

    def forward(self, x: Tensor, edge_index: Tensor, negative: Tensor) -> Tensor:
        return self.model.recon_loss(self.model.encode(x, edge_index), edge_index, negative)


class _LearnedSteps(pyg.MessagePassing):
    """GPR-GNN: steps of propagation, each with a learned weight."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__(aggr="add")
        self.lin, self.steps = nn.Linear(D, 4), nn.Parameter(0.5 ** torch.arange(steps + 1.0))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, norm = gcn_norm(edge_index, None, num_nodes=x.size(0), dtype=x.dtype)
        x = self.lin(F.dropout(x, 0.5, training=self.training))
        out = x * self.steps[0]
        for weight in self.steps[1:]:
            x = self.propagate(edge_index, x=x, norm=norm)
            out = out + weight * x
        return out.log_softmax(dim=1)

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class _SignedAttention(pyg.MessagePassing):
    """FAGCN: a gate between -1 and 1 on each edge, of both ends and their degrees."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.gate = nn.Linear(D, 8), nn.Linear(16, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        norm = degree(col, x.size(0), dtype=x.dtype).clamp(min=1).pow(-0.5)
        h = self.lin(x).relu()
        return 0.3 * h + self.propagate(edge_index, h=h, norm=norm[row] * norm[col])

    def message(self, h_i: Tensor, h_j: Tensor, norm: Tensor) -> Tensor:
        gate = torch.tanh(self.gate(torch.cat([h_i, h_j], dim=1))).squeeze()
        return F.dropout(norm * gate, 0.4, self.training).view(-1, 1) * h_j


class _EdgeUpdate(nn.Module):
    """MetaLayer's edge model: of both ends, the edge and the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * D + 4 + 3, 4)

    def forward(self, src: Tensor, dst: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        return self.lin(torch.cat([src, dst, attr, u[batch]], dim=1)).relu()


class _NodeUpdate(nn.Module):
    """MetaLayer's node model: of the node, the mean of its edges and the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D + 4 + 3, D)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        mean = scatter(attr, edge_index[1], dim=0, dim_size=x.size(0), reduce="mean")
        return self.lin(torch.cat([x, mean, u[batch]], dim=1))


class _GraphUpdate(nn.Module):
    """MetaLayer's global model: of the graph and the mean of its nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3 + D, 3)

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        return self.lin(torch.cat([u, scatter(x, batch, dim=0, reduce="mean")], dim=1))


class _Meta(nn.Module):
    """Edges, nodes and the graph update each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = pyg.MetaLayer(_EdgeUpdate(), _NodeUpdate(), _GraphUpdate())
        self.u = nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor, edge_index: Tensor, attr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x, edge_index, attr, self.u, torch.zeros(x.size(0), dtype=torch.long))


class _Polynomial(nn.Module):
    """A learned polynomial of the Laplacian of the undirected graph, layers under weight and spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(3))
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(D, 8))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        index, weight = get_laplacian(
            to_undirected(edge_index), normalization="sym", num_nodes=x.size(0), dtype=x.dtype
        )
        terms = [self.first(x)]
        for _ in range(2):
            terms.append(scatter(terms[-1][index[0]] * weight[:, None], index[1], 0, x.size(0)))
        return self.last(sum(factor * term for factor, term in zip(self.factors, terms, strict=True)))


def _three_graphs() -> Tensor:
    return torch.arange(NODES) // 20


def _pairs() -> Tensor:
    return types(NODES, 2 * 77).view(2, 77)


def _attr() -> Tensor:
    return edge_features(4)


CASES = [
    # normalisations and readouts
    *[
        case(f"norm {name}", lambda n=n: _Normalised(n()), steps=2)
        for name, n in {
            "BatchNorm": lambda: pyg.BatchNorm(8),
            "LayerNorm graph": lambda: pyg.LayerNorm(8),
            "LayerNorm node": lambda: pyg.LayerNorm(8, mode="node"),
            "GraphNorm": lambda: pyg.GraphNorm(8),
            "PairNorm": lambda: pyg.PairNorm(),
            "InstanceNorm": lambda: pyg.InstanceNorm(8),
            "InstanceNorm running": lambda: pyg.InstanceNorm(8, affine=True, track_running_stats=True),
            "DiffGroupNorm": lambda: pyg.DiffGroupNorm(8, 3),
            "MeanSubtractionNorm": lambda: pyg.MeanSubtractionNorm(),
            "GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
            "MessageNorm": lambda: _Messages(pyg.MessageNorm(learn_scale=True)),
        }.items()
    ],
    case("norm GraphNorm batch", lambda: _Normalised(pyg.GraphNorm(8)), _batch),
    *[
        case(f"pool {p.__name__}", lambda p=p: _Pooled(p))
        for p in (pyg.global_mean_pool, pyg.global_add_pool, pyg.global_max_pool)
    ],
    case("pool global_mean_pool batch", lambda: _Pooled(pyg.global_mean_pool), _batch),
    # models
    case("model GCN", lambda: pyg.GCN(D, 8, 3, 4, dropout=0.3, norm="batch_norm", jk="cat"), steps=3),
    case("model GraphSAGE", lambda: pyg.GraphSAGE(D, 8, 3, 4, dropout=0.3, norm="layer_norm", jk="max"), steps=3),
    case("model GIN", lambda: pyg.GIN(D, 8, 2, 4, dropout=0.3, norm="graph_norm", jk="lstm"), steps=2),
    case("model GAT", lambda: pyg.GAT(D, 8, 2, 4, dropout=0.3, heads=2, norm="pair_norm"), steps=2),
    case("model GAT v2", lambda: pyg.GAT(D, 8, 2, 4, dropout=0.3, v2=True, jk="cat"), steps=2),
    case(
        "model PNA",
        lambda: pyg.PNA(
            D,
            8,
            2,
            4,
            dropout=0.3,
            norm="batch_norm",
            aggregators=["mean", "max", "std"],
            scalers=["identity", "amplification"],
            deg=degrees(),
        ),
        steps=2,
    ),
    case("model EdgeCNN", lambda: pyg.EdgeCNN(D, 8, 2, 4, dropout=0.3, norm="batch_norm", jk="last"), steps=2),
    # models as users write them
    case("own virtual node", _VirtualNode, _three_graphs, steps=2),
    case("own link prediction", _PairScores, _pairs),
    case("own graph autoencoder", _Autoencoder, _pairs),
    case("own learned propagation steps", _LearnedSteps, steps=2),
    case("own signed attention", _SignedAttention, steps=2),
    case("own edges, nodes and graph in turn", _Meta, _attr),
    case("own polynomial of the Laplacian, weight norms", _Polynomial, steps=2),
]
"""What stands around convolutions."""
