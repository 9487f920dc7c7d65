"""Frames, structure, transforms and readouts of the stand-in equal eager DGL on another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl_support import D, Function, check_function, dgl, random_graph, refused
from torch import Tensor

from dgl import function as fn  # isort: skip

import sylvie_fx

pytestmark = pytest.mark.dgl


@pytest.mark.parametrize(
    "function",
    [
        lambda g, x: g.pull([0], fn.copy_u("x", "m"), fn.sum("m", "h")),
        lambda g, x: g.send_and_recv([0], fn.copy_u("x", "m"), fn.sum("m", "h")),
        lambda g, x: g.adj(),
        lambda g, x: g.adj_external(scipy_fmt="csr"),
        lambda g, x: g.edge_subgraph([0]),
        lambda g, x: g.edges(order="srcdst"),
        lambda g, x: g.in_edges(0),
        lambda g, x: dgl.topk_nodes(g, "x", 3),
    ],
)
def test_refused_graph_operations(function: Callable[[Any, Tensor], Any]) -> None:
    message = refused(function)
    assert "can not be captured" in message
    assert "test_dgl_graph.py:" in message


def test_scopes() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.edata["w"] = graph.edata["w"] * 2
            assert "h" in graph.ndata
            inner = graph.edata["w"]
        assert "h" not in graph.ndata
        copy = graph.local_var()
        copy.ndata["h"] = x
        assert "h" not in graph.ndata
        assert set(graph.edata) >= {"w", "f"}
        graph.ndata.update({"unscoped": x * 3})
        graph.nodes["_N"].data["t"] = x
        taken = graph.ndata.pop("t")
        return inner, graph.edata["w"], graph.ndata["unscoped"], taken, graph.edges["_E"].data["f"], graph.srcdata["x"]

    check_function(forward)


def test_structure() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        assert not graph.is_block
        assert graph.is_homogeneous
        assert (graph.ntypes, graph.etypes, graph.canonical_etypes) == (["_N"], ["_E"], [("_N", "_E", "_N")])
        assert (graph.srctypes, graph.dsttypes, graph.batch_size) == (["_N"], ["_N"], 1)
        graph = graph.to(x.device).formats(["coo", "csc"])
        graph.create_formats_()
        assert graph.idtype == torch.int64
        assert graph.int().idtype == torch.int32
        u, v, e = graph.edges(form="all", order="eid")
        sizes = graph.num_nodes() + graph.number_of_edges() + graph.num_src_nodes() + graph.number_of_dst_nodes()
        small = torch.tensor([0, 2])
        return (
            x * sizes, u, v, e, graph.all_edges("eid"), graph.nodes(), graph.has_nodes(small),
            graph.in_degrees(), graph.out_degrees(), graph.in_degrees(small), graph.out_degrees(small),
            *graph.find_edges(small), graph.int().in_degrees(),
        )  # fmt: skip

    check_function(forward)


def test_degrees_of_nodes_as_python_numbers() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        single = graph.in_degrees(3)
        few = graph.in_degrees([0, 1, 2]), graph.out_degrees((4, 2)), graph.out_degrees(range(1, 4))
        return (x * single, *few, graph.in_degrees(graph.nodes()))

    check_function(forward)


@pytest.mark.parametrize("count", [list, tuple, range])
def test_degrees_of_all_nodes_fit_every_graph(count: Callable[[Any], Any]) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        every = range(graph.number_of_nodes())
        every = every if count is range else count(every)
        return x * (graph.in_degrees(every) + 2 * graph.out_degrees(every)).unsqueeze(1)

    report = sylvie_fx.verify(
        Function(forward).double(), random_graph(20, 50, 1), torch.randn(20, D).double(), parts=2, partition="random"
    )
    assert report.exact, report


def test_send_and_recv_along_all_edges() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.send_and_recv(graph.edges(), fn.copy_u("h", "m"), fn.mean("m", "h"))
            graph.send_and_recv(graph.edges(), fn.copy_u("h", "m"), fn.sum("m", "new"))
            return graph.ndata["h"], graph.ndata["new"]

    check_function(forward)
    reversed_ends = refused(lambda g, x: g.send_and_recv(g.edges()[::-1], fn.copy_u("x", "m"), fn.sum("m", "h")))
    assert "send_and_recv() for a part of the edges" in reversed_ends


def test_send_and_recv_along_parallel_edges_is_refused() -> None:
    """DGL looks the edges up by their ends, and finds the same one of several each time."""

    class Model(torch.nn.Module):
        def forward(self, graph: Any, x: Tensor, weight: Tensor) -> Any:
            with graph.local_scope():
                graph.ndata["h"], graph.edata["w"] = x, weight
                graph.send_and_recv(graph.edges(), fn.u_mul_e("h", "w", "m"), fn.sum("m", "new"))
                return graph.ndata["new"]

    parallel = dgl.graph(([0, 0, 1, 2, 3], [1, 1, 2, 3, 0]), num_nodes=4)
    single = dgl.graph(([0, 3, 1, 2, 3], [1, 1, 2, 3, 0]), num_nodes=4)
    x, weight = torch.randn(4, D), torch.rand(5, 1)
    assert sylvie_fx.verify(Model(), single, x, weight, parts=2).exact
    report = sylvie_fx.verify(Model(), parallel, x, weight, parts=2)
    assert report.refused is not None
    assert "of parallel edges DGL takes an arbitrary one" in report.refused
    net = sylvie_fx.distribute(Model())
    net(*net.shard(single, x, weight))
    with pytest.raises(sylvie_fx.SylvieError, match="no parallel edges"):
        net(*net.shard(parallel, x, weight))


def test_apply_on_subsets() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        few = torch.tensor([1, 3])
        graph.ndata["h"] = x
        graph.apply_edges(fn.u_add_v("h", "h", "s"), few)
        graph.apply_edges(lambda edges: {"t": edges.src["h"] * 2}, edges=few)
        graph.apply_nodes(lambda nodes: {"h": nodes.data["h"] * 3}, v=few)
        return graph.edata["s"], graph.edata["t"], graph.ndata["h"]

    check_function(forward)


@pytest.mark.parametrize(
    "transform",
    [
        lambda g: dgl.add_self_loop(g),
        lambda g: dgl.add_self_loop(g, ["f"], fill_data="mean"),
        lambda g: g.add_self_loop(),
        lambda g: dgl.remove_self_loop(g),
        lambda g: g.remove_self_loop().add_self_loop(),
        lambda g: dgl.reverse(g, copy_edata=True),
        lambda g: dgl.transforms.AddReverse(copy_edata=True)(g),
        lambda g: dgl.to_bidirected(g, copy_ndata=True),
        lambda g: dgl.to_simple(g, return_counts="n"),
        lambda g: dgl.add_edges(g, g.nodes()[:3], g.nodes()[:3]),
        lambda g: dgl.remove_edges(g, torch.tensor([1, 4])),
    ],
)
def test_transforms(transform: Callable[[Any], Any]) -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph = transform(graph)
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "h"))
        names = sorted(set(graph.edata) & {"w", "f", "kind", "n"})
        assert graph.ndata["x"].shape == x.shape
        return graph.ndata["h"], graph.in_degrees(), *graph.edges(), *(graph.edata[name] for name in names)

    check_function(forward)


def test_graph_built_in_forward() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        u, v = graph.edges()
        other = dgl.graph((v, u), num_nodes=graph.num_nodes())
        return dgl.ops.copy_u_sum(other, x), other.in_degrees()

    check_function(forward)
    assert "pass num_nodes" in refused(lambda g, x: dgl.graph(g.edges()).num_nodes() * x)


def test_readouts() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"], graph.edata["h"] = x, graph.edata["f"]
        graph.ndata["a"] = x.sum(-1, keepdim=True)
        total = dgl.sum_nodes(graph, "h", "a")
        return (
            total,
            dgl.mean_nodes(graph, "h"), dgl.max_nodes(graph, "h"), dgl.readout_nodes(graph, "h", op="min"),
            dgl.softmax_nodes(graph, "h"), dgl.mean_edges(graph, "h"), dgl.softmax_edges(graph, "h"),
            dgl.broadcast_nodes(graph, total), dgl.broadcast_edges(graph, total),
        )  # fmt: skip

    check_function(forward)


def test_softmax_and_segments() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        f = graph.edata["f"]
        few = torch.tensor([0, 1, 2])
        lengths = torch.stack([torch.tensor(2), torch.tensor(0), torch.tensor(3)])
        return (
            dgl.nn.functional.edge_softmax(graph, f), dgl.ops.edge_softmax(graph, f, norm_by="src"),
            dgl.ops.edge_softmax(graph, f[:3], few), dgl.ops.segment_reduce(lengths, x[:5], "mean"),
            dgl.ops.gather_mm(x, torch.ones(3, D, 2).to(x), idx_b=graph.ndata["kind"]),
        )  # fmt: skip

    check_function(forward)


def test_multi_update_all() -> None:
    def forward(graph: Any, x: Tensor) -> Any:
        graph.ndata["h"] = x
        graph.multi_update_all({"_E": (fn.copy_u("h", "m"), fn.max("m", "out"))}, "sum")
        return graph.ndata["out"]

    check_function(forward)
