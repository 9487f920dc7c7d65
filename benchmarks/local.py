"""An epoch on one process beside unmodified PyG and DGL: forward, backward and a step of Adam, one thread.

    python benchmarks/local.py [--full] [--shape power grid hub clusters] [--models GCN GAT …] [--nodes 20000] [--edges 400000]
                               [--hidden 64] [--rounds 3] [--scale 1 4 16] [--processes 2] [--clock wall] [--json FILE]

Every way has a process of its own, so that what one sets or leaves behind helps no other, and runs once a round in turn,
so that a disturbance of the machine strikes all of them; figures are medians over the rounds, with the spread (largest
less smallest) in brackets, and ratios are medians of the rounds' ratios. A turn is two epochs, of which the second
counts; the first two rounds, which capture, compile and let the heap grow, are left out. ``ours/PyG`` is the PyG model distributed over one process, ``ours/DGL``
the DGL model. ``--full`` is 50k nodes and 1.5M edges. Shapes: a power law, a grid, a random graph with a hub that
every hundredth edge starts or ends in, and 64 clusters, which 2 of 100 edges leave, with nodes in random order.

Times are of the processor, so that other programs on the machine disturb little (``--clock wall`` for the clock on the
wall). With ``--processes``, ``speed-up`` is one process's time over that of the slowest of so many processes, which
have METIS parts, and which wait for one another without using the processor: as with a core each and an unlimited link.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.graphs.generators import grid_graph, power_law_graph

Way = Callable[[], object]
FEATURES, CLASSES, HEADS, STEPS, CLUSTERS, WARM = 64, 16, 4, 10, 64, 2
NAMES = ("GCN", "SAGE mean", "SAGE max", "GAT", "GATv2", "GIN", "APPNP")


class Layers(nn.Module):
    """Two convolutions with a ReLU and dropout between them, or a head behind a propagation."""

    def __init__(self, first: nn.Module, second: nn.Module, graph_first: bool) -> None:
        super().__init__()
        self.first, self.second, self.graph_first = first, second, graph_first

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        for i, layer in enumerate((self.first, self.second)):
            x = F.dropout(F.relu(x), 0.5, self.training) if i else x
            if isinstance(layer, nn.Linear):
                x = layer(x)
            else:
                x = (layer(graph, x) if self.graph_first else layer(x, graph)).flatten(1)
        return x


def pyg_model(name: str, hidden: int) -> nn.Module:
    from torch_geometric import nn as pyg

    def make(convolution: Any, **options: Any) -> Layers:
        return Layers(convolution(FEATURES, hidden, **options), convolution(hidden, CLASSES, **options), False)

    if name == "GIN":
        return Layers(pyg.GINConv(nn.Linear(FEATURES, hidden)), pyg.GINConv(nn.Linear(hidden, CLASSES)), False)
    if name == "APPNP":
        return Layers(nn.Linear(FEATURES, CLASSES), pyg.APPNP(STEPS, 0.1), False)
    if name.startswith("GAT"):
        kind = pyg.GATConv if name == "GAT" else pyg.GATv2Conv
        return Layers(
            kind(FEATURES, hidden // HEADS, heads=HEADS, dropout=0.5), kind(hidden, CLASSES, dropout=0.5), False
        )
    return make(pyg.GCNConv) if name == "GCN" else make(pyg.SAGEConv, aggr=name.split()[1])


class MaxSAGE(nn.Module):
    """The layer that PyG's SAGEConv with aggr="max" is, written against DGL, whose own has a pooling layer in it."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.neighbours, self.own = nn.Linear(features, out), nn.Linear(features, out, bias=False)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        import dgl.function as fn

        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(fn.copy_u("h", "m"), fn.max("m", "h"))
            return self.neighbours(graph.ndata["h"]) + self.own(x)


def dgl_model(name: str, hidden: int) -> nn.Module:
    import dgl.nn as dgl

    if name == "GCN":
        return Layers(dgl.GraphConv(FEATURES, hidden), dgl.GraphConv(hidden, CLASSES), True)
    if name == "SAGE mean":
        return Layers(dgl.SAGEConv(FEATURES, hidden, "mean"), dgl.SAGEConv(hidden, CLASSES, "mean"), True)
    if name == "SAGE max":
        return Layers(MaxSAGE(FEATURES, hidden), MaxSAGE(hidden, CLASSES), True)
    if name == "GIN":
        return Layers(dgl.GINConv(nn.Linear(FEATURES, hidden)), dgl.GINConv(nn.Linear(hidden, CLASSES)), True)
    if name == "APPNP":
        return Layers(nn.Linear(FEATURES, CLASSES), dgl.APPNPConv(STEPS, 0.1), True)
    kind = dgl.GATConv if name == "GAT" else dgl.GATv2Conv
    return Layers(kind(FEATURES, hidden // HEADS, HEADS, attn_drop=0.5), kind(hidden, CLASSES, 1, attn_drop=0.5), True)


def make_graph(shape: str, nodes: int, edges: int) -> Tensor:
    """``[2, edges]`` without self loops."""
    if shape == "power":
        index = power_law_graph(nodes, edges // 2, FEATURES, CLASSES).edge_index
    elif shape == "grid":
        side = math.isqrt(nodes)
        index = grid_graph(side, side, FEATURES, CLASSES).edge_index
    elif shape == "clusters":
        generator, size = torch.Generator().manual_seed(0), max(nodes // CLUSTERS, 1)
        index = torch.randint(nodes, (2, edges), generator=generator)
        near = index[0] // size * size + torch.randint(size, (edges,), generator=generator)
        index[1] = torch.where(torch.rand(edges, generator=generator) < 0.02, index[1], near.clamp_(max=nodes - 1))
        index = torch.randperm(nodes, generator=generator)[index]
    else:
        index = torch.randint(nodes, (2, edges), generator=torch.Generator().manual_seed(0))
        index[0, ::200] = 0
        index[1, 100::200] = 0
    return index[:, index[0] != index[1]]


def epoch(model: Any, data: tuple[Any, ...], y: Any) -> Way:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(*data), y).backward()
        optimizer.step()

    return run


def distributed(model: nn.Module, *data: Any) -> Way:
    net = sylvie_fx.distribute(copy.deepcopy(model), bits=32)
    x, graph, y = net.shard(*data)
    return epoch(net, (x, graph), y)


WAYS = ("PyG", "PyG CSR", "DGL", "ours/PyG", "ours/DGL")


def make_way(way: str, name: str, index: Tensor, nodes: int, hidden: int) -> Way:
    """One way to run an epoch of one model.

    Raises:
        ImportError: A library is not installed.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(nodes, FEATURES, generator=generator), torch.randint(CLASSES, (nodes,), generator=generator)
    torch.manual_seed(0)
    if way.endswith("DGL"):
        import dgl

        model, graph = dgl_model(name, hidden), dgl.graph((index[0], index[1]), num_nodes=nodes)
        if not name.startswith(("SAGE", "GIN")):
            graph = dgl.add_self_loop(graph)
        graph.create_formats_()
        return epoch(model, (x, graph), y) if way == "DGL" else distributed(model, x, graph, y)
    model = pyg_model(name, hidden)
    if way == "PyG CSR":
        import torch_geometric.utils as pyg_utils

        adjacency = pyg_utils.to_torch_csr_tensor(index.flip(0), size=(nodes, nodes))
        return epoch(model, (x, adjacency), y)
    return epoch(model, (x, index), y) if way == "PyG" else distributed(model, x, index, y)


CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def serve(options: argparse.Namespace) -> None:
    """A process that runs an epoch of one way for each line that it reads, and says how long it took."""
    shape = options.shape[0]
    index, nodes = make_graph(shape, options.nodes, options.edges), nodes_of(shape, options.nodes)
    clock = CLOCKS[options.clock]
    try:
        run = make_way(options.way, options.worker, index, nodes, options.hidden)
        print("TOOK 0", flush=True)
        for _ in sys.stdin:
            run()  # others had the caches meanwhile
            start = clock()
            run()
            print(f"TOOK {clock() - start}", flush=True)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, ImportError) as error:
        print(f"{options.way} does not run: {str(error).splitlines()[0]}", file=sys.stderr)


def _took(process: subprocess.Popen[str]) -> float | None:
    """What a serving process says next; None where it has ended."""
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("TOOK ")), None)
    return None if line is None else float(line.split()[1])


def measure(options: argparse.Namespace, name: str, shape: str) -> dict[str, list[float]]:
    """Seconds of each way in each round; fewer rounds where they take long, and no way that does not run."""
    ways = [way for way in WAYS if way not in options.skip and not (way == "PyG CSR" and name.startswith("GAT"))]
    times: dict[str, list[float]] = {way: [] for way in ways}
    processes = {way: subprocess.Popen(_command(options, name, shape, "--way", way), stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True) for way in ways}  # fmt: skip
    for way in ways:
        if _took(processes[way]) is None:
            del times[way]
    begin = math.inf
    for number in range(options.rounds + WARM):
        begin = time.perf_counter() if number == WARM else begin
        for way in list(times):
            pipe = processes[way].stdin
            assert pipe is not None
            pipe.write("\n")
            pipe.flush()
            took = _took(processes[way])
            if took is None:
                del times[way]
            elif number >= WARM:
                times[way].append(took)
        if number >= WARM and time.perf_counter() - begin > options.seconds:
            break
    for process in processes.values():
        process.communicate()
    return times


def _command(options: argparse.Namespace, name: str, shape: str, *more: str) -> list[str]:
    """This script as a worker."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", name, "--shape", shape, *more]
    for option in ("nodes", "edges", "hidden", "rounds", "threads", "clock"):
        command += [f"--{option}", str(getattr(options, option))]
    return command


RATIOS = (("PyG", "ours/PyG"), ("PyG CSR", "ours/PyG"), ("DGL", "ours/PyG"), ("DGL", "ours/DGL"))


def parallel(options: argparse.Namespace, name: str, shape: str) -> list[float]:
    """Seconds of the slowest of several processes in each round."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"]
    python, *rest = _command(options, name, shape)
    command = [python, *launcher, *rest]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{name} on {options.processes} processes failed:\n{done.stderr[-3000:]}")
    return list(json.loads(found[0]))


def worker(options: argparse.Namespace) -> None:
    """One of several processes: the PyG model on this rank's part."""
    index, nodes = make_graph(options.shape[0], options.nodes, options.edges), nodes_of(options.shape[0], options.nodes)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(nodes, FEATURES, generator=generator), torch.randint(CLASSES, (nodes,), generator=generator)
    torch.manual_seed(0)
    net = sylvie_fx.distribute(pyg_model(options.worker, options.hidden), bits=32)
    x, index, y = net.shard(x, index, y)
    run, clock, times = epoch(net, (x, index), y), CLOCKS[options.clock], []
    for _ in range(options.rounds + WARM):
        run()  # as where one process serves
        start = clock()
        run()
        times.append(clock() - start)
    slowest = net.transport.all_reduce(torch.tensor(times[WARM:], dtype=torch.float64), "times", "max")
    if net.transport.rank == 0:
        print("RESULT " + json.dumps(slowest.tolist()), flush=True)


def nodes_of(shape: str, nodes: int) -> int:
    return math.isqrt(nodes) ** 2 if shape == "grid" else nodes


def ratio(times: dict[str, list[float]], other: str, ours: str) -> float | None:
    if other not in times or ours not in times:
        return None
    return statistics.median(a / b for a, b in zip(times[other], times[ours], strict=True))


def row(model: str, shape: str, times: dict[str, list[float]]) -> str:
    cells = []
    for way in WAYS:
        spent = [1e3 * t for t in times.get(way, [])]
        cells.append(f"{statistics.median(spent):.0f} ({max(spent) - min(spent):.0f})" if spent else "-")
    for pair in RATIOS:
        found = ratio(times, *pair)
        cells.append("-" if found is None else f"{found:.2f}")
    if "parallel" in times:
        cells.append(f"{statistics.median(times['ours/PyG']) / statistics.median(times['parallel']):.2f}")
    return f"| {model} | {shape} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=400_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="no further round of a model after so many seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", nargs="*", choices=("power", "grid", "hub", "clusters"), default=["power"])
    parser.add_argument("--models", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--skip", nargs="*", default=[], help="ways that are not run, such as PyG")
    parser.add_argument("--full", action="store_true", help="50k nodes, 1.5M edges")
    parser.add_argument(
        "--scale", nargs="*", type=int, default=[1], help="times so many nodes and edges, one after the other"
    )
    parser.add_argument("--processes", type=int, default=1, help="so many processes beside one")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.full:
        options.nodes, options.edges, options.seconds = 50_000, 1_500_000, 120.0
    torch.set_num_threads(options.threads)
    if options.worker:
        serve(options) if options.way else worker(options)
        return
    records = []
    base = options.nodes, options.edges
    for scale in options.scale:
        options.nodes, options.edges = scale * base[0], scale * base[1]
        print(f"{options.nodes} nodes, {options.edges} edges, {options.hidden} hidden, {options.threads} thread(s), "
              f"{options.clock} ms an epoch (spread)\n")  # fmt: skip
        more = " speed-up |" if options.processes > 1 else ""
        print("| model | graph | PyG | PyG CSR | DGL | ours/PyG | ours/DGL | PyG : ours | CSR : ours | DGL : ours/PyG "
              f"| DGL : ours/DGL |{more}")  # fmt: skip
        print("| --- | --- " + "| ---: " * (10 if more else 9) + "|")
        for shape in options.shape:
            for name in options.models:
                times = measure(options, name, shape)
                if options.processes > 1:
                    times["parallel"] = parallel(options, name, shape)
                records.append({"model": name, "graph": shape, "scale": scale, "seconds": times})
                print(row(name, shape, times), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "records": records}, indent=1))


if __name__ == "__main__":
    main()
