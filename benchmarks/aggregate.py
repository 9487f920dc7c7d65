"""Speed of the neighbour aggregations beside torch, DGL, the gathers and scatters that PyG makes, and the memory.

    python benchmarks/aggregate.py [--quick] [--nodes 50000] [--edges 1500000] [--features 128] [--heads 8]
                                   [--threads 1] [--rounds 5] [--sorted] [--only WORD] [--json FILE]

Two bounds stand beside every time. ``copy`` gathers the row of every edge into an edges x features tensor (what
``index_select`` does, and what an unfused aggregation begins with); ``read`` gathers the same rows into a buffer that
stays in cache, so that only reading is left. Every way is measured once a round, so a disturbance of the machine
strikes all of them; a ratio is the median of the rounds' ratios. Edges come in random order, or sorted by destination
with ``--sorted``. Targets: 0.7 of the copy, forward and backward; 5x DGL's u_mul_e_sum, 1x its copy_u_sum, 2x its GAT.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import sylvie_fx  # noqa: F401  makes DGL importable
from sylvie_fx.kernels import aggregate_library
from sylvie_fx.kernels.aggregate import EdgeLayout, attention, segment_softmax, spmm

Way = Callable[[], object]
SLOW = ("pyg", "dgl u_mul_e")  # measured in three rounds only
READ_ROWS = 1024  # rows a piece of the buffer in cache


def both(name: str, compute: Callable[[], Tensor], inputs: list[Tensor], ways: dict[str, Way]) -> None:
    """Add the forward pass of ``compute`` and the backward pass to ``inputs``."""
    ways[f"{name} forward"] = compute
    state: list[Tensor] = []

    def backward() -> object:
        if not state:
            out = compute()
            state.extend((out, torch.randn_like(out)))
        return torch.autograd.grad(state[0], inputs, state[1], retain_graph=True)

    ways[f"{name} backward"] = backward


def add_bounds(ways: dict[str, Way], src: Tensor, dst: Tensor, x: Tensor) -> None:
    rows = src[torch.sort(dst, stable=True).indices]  # in the order in which an aggregation reads them
    data, out = x.detach(), torch.empty(len(rows), x.shape[1])
    pieces = rows.split(READ_ROWS)
    buffer = torch.empty(READ_ROWS, x.shape[1])

    def read() -> None:
        for piece in pieces:
            torch.index_select(data, 0, piece, out=buffer[: len(piece)])

    ways["copy"] = lambda: torch.index_select(data, 0, rows, out=out)
    ways["read"] = read


def add_ours(ways: dict[str, Way], layout: EdgeLayout, given: dict[str, Tensor], heads: int) -> None:
    x, weight, weights = given["x"], given["weight"], given["weights"]
    tall, scores = x.view(x.shape[0], heads, -1), [given["source"], given["target"]]
    both("ours sum", lambda: spmm(layout, x), [x], ways)
    both("ours mean", lambda: spmm(layout, x, None, "mean"), [x], ways)
    both("ours weighted sum, fixed weight", lambda: spmm(layout, x, weight.detach()), [x], ways)
    both("ours weighted sum", lambda: spmm(layout, x, weight), [x, weight], ways)
    both("ours head-weighted sum", lambda: spmm(layout, tall, weights), [x, weights], ways)
    both("ours max", lambda: spmm(layout, x, None, "max"), [x], ways)
    both("ours softmax", lambda: segment_softmax(layout, weights), [weights], ways)
    both("ours GAT", lambda: attention(layout, tall, *scores), [x, *scores], ways)


def add_torch(ways: dict[str, Way], layout: EdgeLayout, given: dict[str, Tensor], heads: int) -> None:
    """A CSR product, and gathers and scatters as PyG makes them on an edge_index."""
    src, dst, n = layout.src, layout.dst, layout.n_dst
    x, weight, weights = given["x"], given["weight"], given["weights"]
    rows, data = layout.by_destination, x.detach()
    matrix = torch.sparse_csr_tensor(
        rows.indptr, rows.sorted_columns.long(), torch.ones(layout.edges), (n, layout.n_src), check_invariants=False
    )
    ways["torch CSR sum forward"] = lambda: matrix @ data

    def scatter(messages: Tensor) -> Tensor:
        return messages.new_zeros(n, *messages.shape[1:]).index_add(0, dst, messages)

    def largest(messages: Tensor) -> Tensor:
        index = dst.view(-1, 1).expand_as(messages)
        return messages.new_zeros(n, messages.shape[1]).scatter_reduce(0, index, messages, "amax", include_self=False)

    def softmax(scores: Tensor) -> Tensor:
        powers = (scores - largest(scores.detach())[dst]).exp()
        return powers / (scatter(powers) + 1e-16)[dst]

    def gat() -> Tensor:
        scores = torch.nn.functional.leaky_relu(given["source"][src] + given["target"][dst], 0.2)
        return scatter(x.view(x.shape[0], heads, -1)[src] * softmax(scores).unsqueeze(2))

    both("pyg sum", lambda: scatter(x[src]), [x], ways)
    both("pyg weighted sum", lambda: scatter(x[src] * weight.unsqueeze(1)), [x, weight], ways)
    both("pyg max", lambda: largest(x[src]), [x], ways)
    both("pyg softmax", lambda: softmax(weights), [weights], ways)
    both("pyg GAT", gat, [x, given["source"], given["target"]], ways)


def add_dgl(ways: dict[str, Way], layout: EdgeLayout, given: dict[str, Tensor], heads: int) -> None:
    try:
        import dgl
    except ImportError as error:
        print(f"without DGL: {error}")
        return
    graph = dgl.graph((layout.src, layout.dst), num_nodes=layout.n_dst)
    graph.create_formats_()
    x, weight, weights = given["x"], given["weight"], given["weights"]
    tall, edge_weight = x.view(x.shape[0], heads, -1), weight.view(-1, 1)

    def gat() -> Tensor:  # dgl.nn.GATConv after its linear layer
        source, target = given["source"].unsqueeze(2), given["target"].unsqueeze(2)
        scores = torch.nn.functional.leaky_relu(dgl.ops.u_add_v(graph, source, target), 0.2)
        return dgl.ops.u_mul_e_sum(graph, tall, dgl.ops.edge_softmax(graph, scores))

    both("dgl copy_u_sum", lambda: dgl.ops.copy_u_sum(graph, x), [x], ways)
    both("dgl u_mul_e_sum", lambda: dgl.ops.u_mul_e_sum(graph, x, edge_weight), [x, weight], ways)
    both("dgl u_mul_e_sum by head", lambda: dgl.ops.u_mul_e_sum(graph, tall, weights.unsqueeze(2)), [x, weights], ways)
    both("dgl copy_u_max", lambda: dgl.ops.copy_u_max(graph, x), [x], ways)
    both("dgl edge_softmax", lambda: dgl.ops.edge_softmax(graph, weights.unsqueeze(2)), [weights], ways)
    both("dgl GAT", gat, [x, given["source"], given["target"]], ways)


def measure(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first warms up
        for name, way in ways.items():
            if number > 3 and name.startswith(SLOW):
                continue
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


RIVALS = {
    "ours sum": ("torch CSR sum", "pyg sum", "dgl copy_u_sum"),
    "ours weighted sum": ("pyg weighted sum", "dgl u_mul_e_sum"),
    "ours head-weighted sum": ("dgl u_mul_e_sum by head",),
    "ours max": ("pyg max", "dgl copy_u_max"),
    "ours softmax": ("pyg softmax", "dgl edge_softmax"),
    "ours GAT": ("pyg GAT", "dgl GAT"),
}


def report(seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """A record for each way: milliseconds, and how many times as long the bounds and the rivals take."""

    def times_ours(other: str, times: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(seconds[other], times, strict=False))

    records: list[dict[str, object]] = []
    for name, times in seconds.items():
        record: dict[str, object] = {"way": name, "ms": 1e3 * statistics.median(times)}
        record |= {"low": 1e3 * min(times), "high": 1e3 * max(times)}
        record |= {f"/{bound}": times_ours(bound, times) for bound in ("copy", "read")}
        what, _, direction = name.rpartition(" ")
        rivals = [f"{rival} {direction}" for rival in RIVALS.get(what, ())]
        record["rivals"] = {rival: times_ours(rival, times) for rival in rivals if seconds.get(rival)}
        records.append(record)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=1_500_000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sorted", action="store_true", help="edges sorted by destination")
    parser.add_argument("--quick", action="store_true", help="a tenth of the graph, three rounds")
    parser.add_argument("--only", default="", help="only the ways with this word, and the bounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.edges, options.rounds = options.nodes // 10, options.edges // 10, 3
    torch.set_num_threads(options.threads)
    compiled = (
        aggregate_library.instruction_set() if aggregate_library.available() else "not compiled: the torch reference"
    )
    order = "sorted by destination" if options.sorted else "in random order"
    print(
        f"{platform.machine()}, kernels {compiled}, {options.threads} thread(s), {options.nodes} nodes, "
        f"{options.edges} edges {order}, {options.features} float32 features, {options.heads} heads"
    )
    torch.manual_seed(0)
    src, dst = torch.randint(options.nodes, (2, options.edges)).unbind(0)
    if options.sorted:
        dst = dst.sort().values
    start = time.perf_counter()
    layout = EdgeLayout(src, dst, options.nodes, options.nodes).prepare()
    print(f"layout, both ways: {1e3 * (time.perf_counter() - start):.0f} ms")
    given = {
        "x": torch.randn(options.nodes, options.features, requires_grad=True),
        "weight": torch.rand(options.edges, requires_grad=True),
        "weights": torch.rand(options.edges, options.heads, requires_grad=True),
        "source": torch.randn(options.nodes, options.heads, requires_grad=True),
        "target": torch.randn(options.nodes, options.heads, requires_grad=True),
    }
    ways: dict[str, Way] = {}
    add_ours(ways, layout, given, options.heads)
    add_torch(ways, layout, given, options.heads)
    add_dgl(ways, layout, given, options.heads)
    ways = {name: way for name, way in ways.items() if options.only in name}
    add_bounds(ways, src, dst, given["x"])
    records = report(measure(ways, options.rounds))
    print(f"{'':40}{'ms':>8}{'lowest':>9}{'highest':>9}{'of copy':>9}{'of read':>9}  times as fast as")
    for r in records:
        rivals = ", ".join(f"{ratio:.1f}x {rival.rpartition(' ')[0]}" for rival, ratio in r["rivals"].items())  # type: ignore[attr-defined]
        print(f"{r['way']:40}{r['ms']:8.1f}{r['low']:9.1f}{r['high']:9.1f}{r['/copy']:9.2f}{r['/read']:9.2f}  {rivals}")
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "records": records}, indent=1))


if __name__ == "__main__":
    main()
