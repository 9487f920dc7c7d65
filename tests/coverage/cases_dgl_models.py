"""DGL's graph methods in layers as users write them."""

from __future__ import annotations

from typing import Any

from cases_dgl import D, case  # isort: skip  (makes DGL importable)

import dgl.function as fn
import torch
import torch.nn.functional as F
from coverage_cases import EDGES
from torch import Tensor, nn


class _Degrees(nn.Module):
    """Degrees asked for a range, a list and a tensor of all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, 4)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        count = g.number_of_nodes()
        norm = g.in_degrees(range(count)).to(x.dtype).clamp(min=1).pow(-0.5).unsqueeze(1)
        out = g.out_degrees(list(range(count))) + g.in_degrees(g.nodes())
        with g.local_scope():
            g.ndata["h"] = x * norm
            g.update_all(fn.copy_u("h", "m"), fn.sum("m", "h"))
            return self.lin(g.ndata["h"] * norm) * out.to(x.dtype).unsqueeze(1)


class _GraphTransformer(nn.Module):
    """Attention along all edges by send_and_recv, with exponentials that are clamped instead of shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        with g.local_scope():
            for name in ("q", "k", "v"):
                g.ndata[name] = getattr(self, name)(x).view(-1, 2, 4)
            g.apply_edges(fn.u_mul_v("k", "q", "score"))
            g.apply_edges(lambda edges: {"s": (edges.data["score"].sum(-1, keepdim=True) / 2).clamp(-5, 5).exp()})
            along = g.edges()
            g.send_and_recv(along, fn.u_mul_e("v", "s", "v"), fn.sum("v", "sum"))
            g.send_and_recv(along, fn.copy_e("s", "s"), fn.sum("s", "weight"))
            return self.norm(x + self.out((g.ndata["sum"] / (g.ndata["weight"] + 1e-6)).view(-1, 8)))


class _Mailbox(nn.Module):
    """GAT as in DGL's first tutorial: message and reduce functions in Python, a softmax over the mailbox."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.score = nn.Linear(D, 8), nn.Linear(16, 1)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        g = g.local_var()
        g.ndata["z"] = self.lin(x)
        g.apply_edges(self.attend)
        g.update_all(lambda edges: {"z": edges.src["z"], "e": edges.data["e"]}, self.reduce)
        return g.ndata["h"]

    def attend(self, edges: Any) -> dict[str, Tensor]:
        return {"e": F.leaky_relu(self.score(torch.cat([edges.src["z"], edges.dst["z"]], dim=1)))}

    def reduce(self, nodes: Any) -> dict[str, Tensor]:
        weight = F.softmax(nodes.mailbox["e"], dim=1)
        return {"h": (weight * nodes.mailbox["z"]).sum(1) + nodes.mailbox["z"].mean(1)}


class _EdgeTable(nn.Module):
    """A learned number for each edge, and a function of nodes behind the aggregation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.lin = nn.Embedding(EDGES, 1), nn.Linear(D, 4)

    def forward(self, g: Any, x: Tensor) -> Tensor:
        with g.local_scope():
            g.edata["w"], g.ndata["h"] = self.weight(g.edges(form="eid")), x
            g.update_all(
                fn.u_mul_e("h", "w", "m"), fn.mean("m", "n"), lambda nodes: {"h": nodes.data["h"] + nodes.data["n"]}
            )
            return self.lin(g.ndata["h"])


CASES = [
    case("own degrees of all nodes", _Degrees),
    case("own graph transformer, send_and_recv", _GraphTransformer, simple=True),
    case(
        "own send_and_recv, parallel edges", _GraphTransformer, refusal="of parallel edges DGL takes an arbitrary one"
    ),
    case("own softmax over the mailbox", _Mailbox),
    case("own table of edges", _EdgeTable),
]
"""What is not a layer of dgl.nn."""
