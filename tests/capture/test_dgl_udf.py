"""Message passing: DGL's functions and the user's own, captured, equal eager DGL on another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl_support import D, capture, check_function, dgl, refused
from torch import Tensor

from dgl import function as fn  # isort: skip
from dgl.nn import pytorch as dglnn  # isort: skip

from sylvie_fx.ir.errors import CaptureError

pytestmark = pytest.mark.dgl


@pytest.mark.parametrize("message", ["copy_u", "u_add_v", "v_sub_u", "u_mul_e", "e_div_u", "u_dot_e", "e_dot_v"])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_builtin_functions(message: str, reduce: str) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"], graph.edata["h"] = x.exp(), graph.edata["f"].exp()
        args = ("h", "m") if message.startswith("copy") else ("h", "h", "m")
        graph.update_all(getattr(fn, message)(*args), getattr(fn, reduce)("m", "out"))
        return graph.ndata["out"]

    check_function(forward)


def test_broadcast_of_heads() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"], graph.edata["a"] = x.view(-1, 2, 2), graph.edata["w"]
        graph.update_all(fn.u_mul_e("h", "a", "m"), fn.sum("m", "h"))
        other = dgl.ops.u_mul_e_sum(graph, x, graph.edata["f"][:, :1])
        return graph.ndata["h"], other, dgl.ops.copy_e_mean(graph, graph.edata["f"])

    check_function(forward)


def test_message_function() -> None:
    def message(edges: Any) -> dict[str, Tensor]:
        src, dst, ids = edges.edges()
        assert edges.canonical_etype == ("_N", "_E", "_N")
        assert "w" in edges.data
        scale = (src - dst).abs() + 1 + ids - ids
        return {"m": torch.cat([edges.src["h"], edges.dst["h"]], -1).view(len(edges), 2, -1) / scale.view(-1, 1, 1)}

    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.update_all(message, fn.mean("m", "h"), lambda nodes: {"h": nodes.data["h"].flatten(1) * 2, "k": x})
        graph.apply_edges(lambda edges: {"z": edges.src["h"] * edges.data["w"].unsqueeze(-1)})
        graph.apply_nodes(lambda nodes: {"h": nodes.data["h"] + nodes.data["k"].sum(-1, keepdim=True)})
        return graph.ndata["h"], graph.edata["z"], torch.ones(len(graph.nodes()), 1).to(x)

    check_function(forward)


REDUCERS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "sum": lambda nodes: {"h": nodes.mailbox["m"].sum(1)},
    "sum-dim": lambda nodes: {"h": torch.sum(nodes.mailbox["m"], dim=1)},
    "mean-keepdim": lambda nodes: {"h": nodes.mailbox["m"].mean(dim=1, keepdim=True).squeeze(1)},
    "max": lambda nodes: {"h": torch.max(nodes.mailbox["m"], dim=1)[0]},
    "max-values": lambda nodes: {"h": nodes.mailbox["m"].max(1).values},
    "min-unpacked": lambda nodes: {"h": _first(*torch.min(nodes.mailbox["m"], 1))},
    "amax": lambda nodes: {"h": torch.amax(nodes.mailbox["m"], -2)},
    "bias": lambda nodes: {"h": nodes.mailbox["m"].sum(1) + 1.5},
    "own-data": lambda nodes: {"h": nodes.data["h"] * 0.5 + torch.relu(nodes.mailbox["m"]).mean(1)},
    "attention": lambda nodes: {
        "h": (torch.softmax((nodes.mailbox["m"] * nodes.data["h"].unsqueeze(1)).sum(-1), dim=1).unsqueeze(-1)
              * nodes.mailbox["m"]).sum(1)
    },
    "variance": lambda nodes: {
        "h": ((nodes.mailbox["m"] - nodes.mailbox["m"].mean(1, keepdim=True)) ** 2).mean(1)
    },
    "degree": lambda nodes: {"h": nodes.mailbox["m"].sum(1) / nodes.mailbox["m"].shape[1] ** 0.5},
    "two-mailboxes": lambda nodes: {
        "h": torch.cat([2 * nodes.mailbox["m"], nodes.mailbox["k"][:, :, :2]], dim=-1).sum(dim=1)
    },
    "nodes": lambda nodes: {"h": nodes.mailbox["m"].sum(1) + nodes.nodes().unsqueeze(-1), "n": _count(nodes)},
}  # fmt: skip


def _first(values: Tensor, positions: object) -> Tensor:
    return values


def _count(nodes: Any) -> Tensor:
    return torch.ones_like(nodes.data["h"][:, :2])


@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_function(name: str) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.update_all(lambda edges: {"m": edges.src["h"], "k": edges.data["f"]}, REDUCERS[name])
        return graph.ndata["h"]

    check_function(forward)


@pytest.mark.parametrize(
    ("reducer", "text"),
    [
        (lambda nodes: {"h": nodes.mailbox["m"][:, 0]}, "an index into the messages of a node"),
        (lambda nodes: {"h": torch.sort(nodes.mailbox["m"], dim=1)[0].sum(1)}, "sort over the messages of a node"),
        (lambda nodes: {"h": nodes.mailbox["m"].prod(1)}, "prod over the messages of a node"),
        (lambda nodes: {"h": nodes.mailbox["m"] * 2}, "'h' is not reduced"),
        (lambda nodes: {"h": nodes.mailbox["m"].sum()}, "sum over its whole mailbox"),
        (lambda nodes: {"h": nodes.mailbox["m"].view(-1, 4).sum(1)}, "a new shape of the mailbox"),
        (lambda nodes: {"h": nodes.data["h"]} if nodes.mailbox["m"].size(1) > 2 else {}, "the number of messages"),
        (lambda nodes: {"h": torch.max(nodes.mailbox["m"], dim=1)[1].float()}, "the position of a maximum"),
        (lambda nodes: {"h": nodes.mailbox["m"].sum(1) / nodes.batch_size()}, "batch_size() in a reduce function"),
        (lambda nodes: {"h": torch.einsum("ndf->nf", nodes.mailbox["m"])}, "einsum on its mailbox"),
    ],
)
def test_refused_reduce_function(reducer: Callable[[Any], Any], text: str) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), reducer)
        return graph.ndata["h"]

    message = refused(forward)
    assert text in message
    assert "test_dgl_udf.py:" in message


def test_lstm_is_refused() -> None:
    model = dglnn.SAGEConv(D, 3, "lstm")
    with pytest.raises(CaptureError, match=r"sageconv\.py:\d+: .*lstm on its mailbox"):
        capture(model, lambda m, g, n, e: m(g, n["x"]))
