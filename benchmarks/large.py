"""Time and peak memory of shard() and of an epoch on a random graph: 2 processes against the unmodified model on one.

    python benchmarks/large.py [--model GAT] [--nodes 200000] [--edges 4000000] [--processes 2] [--bits 32]

Each configuration runs in processes of its own with one thread each; the epochs' median counts, the first is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(kind: str, model_name: str, nodes: int, edges: int, bits: int, epochs: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, 128, generator=generator)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    y = torch.randint(16, (nodes,), generator=generator)
    torch.manual_seed(0)
    if kind == "dgl":
        import sylvie_fx.dgl  # makes DGL importable, so it comes first
        import dgl  # isort: skip
        from dgl.nn import GATConv, GraphConv  # isort: skip

        graph = dgl.add_self_loop(dgl.graph((edge_index[0], edge_index[1]), num_nodes=nodes))
        pair = (
            (GATConv(128, 16, 4, attn_drop=0.5), GATConv(64, 16, 1, attn_drop=0.5))
            if model_name == "GAT"
            else (GraphConv(128, 64), GraphConv(64, 16))
        )
        model: nn.Module = _Layers(*pair, graph_first=True)
        data = (graph, x)
    else:
        from torch_geometric.nn import GATConv as PyGGATConv
        from torch_geometric.nn import GCNConv

        pair = (
            (PyGGATConv(128, 16, heads=4, dropout=0.5), PyGGATConv(64, 16, dropout=0.5))
            if model_name == "GAT"
            else (GCNConv(128, 64), GCNConv(64, 16))
        )
        model, data = _Layers(*pair, graph_first=False), (x, edge_index)
    base, start, shard_s, rank = peak_mib(), time.perf_counter(), 0.0, 0
    if kind.startswith("sylvie"):
        import sylvie_fx

        net = sylvie_fx.distribute(model, bits=bits, recompute=kind == "sylvie-recompute")
        *data, y = net.shard(*data, y, partition="contiguous")
        model, rank = net, net.transport.rank
        del x, edge_index
        shard_s = time.perf_counter() - start
    optimizer = torch.optim.Adam(model.parameters())
    times = []
    for _ in range(epochs + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*data), y)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    found = {"shard_s": shard_s, "first_s": times[0], "epoch_s": statistics.median(times[1:]), "loss": loss.item(),
             "spread_s": max(times[1:]) - min(times[1:]), "peak_mib": peak_mib(), "data_mib": base}  # fmt: skip
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)


class _Layers(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module, graph_first: bool) -> None:
        super().__init__()
        self.first, self.second, self.graph_first = first, second, graph_first

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        graph, x = (a, b) if self.graph_first else (b, a)
        for i, layer in enumerate((self.first, self.second)):
            x = F.relu(x) if i else x
            x = (layer(graph, x) if self.graph_first else layer(x, graph)).flatten(1)
        return x


def run(kind: str, processes: int, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", kind]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    for name in ("model", "nodes", "edges", "bits", "epochs"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line.removeprefix("RESULT ")))
    raise RuntimeError(f"{kind} on {processes} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("GCN", "GAT"), default="GCN")
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--worker")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.model, arguments.nodes, arguments.edges, arguments.bits, arguments.epochs)
        return
    rows = {
        "PyG, unmodified": run("pyg", 1, arguments),
        "DGL, unmodified": run("dgl", 1, arguments),
        "sylvie_fx (PyG model), 1 process": run("sylvie", 1, arguments),
        "the same with recompute=True": run("sylvie-recompute", 1, arguments),
        f"sylvie_fx (PyG model), {arguments.processes} processes": run("sylvie", arguments.processes, arguments),
        f"the same with recompute=True, {arguments.processes} processes": run(
            "sylvie-recompute", arguments.processes, arguments
        ),
    }
    print("| | shard s | first epoch s | epoch s (spread) | / PyG | / DGL | peak MiB a process | / PyG |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    pyg, dgl = rows["PyG, unmodified"], rows["DGL, unmodified"]
    for name, r in rows.items():
        print(f"| {name} | {r['shard_s']:.2f} | {r['first_s']:.2f} | {r['epoch_s']:.2f} ({r['spread_s']:.2f}) | {r['epoch_s'] / pyg['epoch_s']:.2f} "
              f"| {r['epoch_s'] / dgl['epoch_s']:.2f} | {r['peak_mib']:.0f} | {r['peak_mib'] / pyg['peak_mib']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
