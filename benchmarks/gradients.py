"""Fidelity of the gradient: how far the gradient of a coded step lies from the exact one at the same weights.

    python benchmarks/gradients.py [--data "block model"] [--steps 100] [--write]

A model trains with coded exchanges; in five steps that end at each of several points the exact gradient (float32
exchanges, the same weights and states) is computed beside the coded one. Of the whole gradient, all parameters in one
vector: the relative error |coded - exact| / |exact| and the cosine of their angle, means over the five steps. The
variants with memory are thus measured with the memory that training has given them. No dropout.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from accuracy import Setting, make, settings
from torch import Tensor

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.graphs.partition import partition_nodes
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport

MODELS = {"block model": "SAGE", "cora": "GCN", "amazon_photo": "GCN"}
SCHEMES: dict[str, dict[str, object]] = {
    "1 bit shift (default)": {"bits": 1},
    "1 bit plain": {"bits": 1, "variant": "plain", "gradients": "plain"},
    "1 bit difference, gradients shift": {"bits": 1, "variant": "difference"},
    "1 bit feedback, gradients shift": {"bits": 1, "variant": "feedback"},
    "2 bit shift": {"bits": 2},
    "2 bit plain": {"bits": 2, "variant": "plain", "gradients": "plain"},
    "4 bit shift": {"bits": 4},
    "4 bit plain": {"bits": 4, "variant": "plain", "gradients": "plain"},
    "8 bit shift": {"bits": 8},
    "bfloat16": {"bits": 16},
}
WINDOW = 5


def fidelity(
    setting: Setting, model: str, parts: int, partition: str, points: list[int], options: dict[str, object], seed: int
) -> list[tuple[float, float]]:
    """Relative error and cosine at each point, which is a number of steps."""
    graph = setting.graph(seed)
    assignment = partition_nodes(graph.num_nodes, *graph.edge_index, parts, partition, seed)
    torch.manual_seed(seed)
    state = make(model, graph, setting.hidden, setting.layers, 0.0, 0.0).state_dict()
    caches = ProgramCache(), ProgramCache()

    def rank(transport: Transport) -> list[tuple[float, float]]:
        own = make(model, graph, setting.hidden, setting.layers, 0.0, 0.0)
        own.load_state_dict(state)
        nets = []
        for given, cache in zip(({"bits": 32}, options), caches, strict=True):
            net = sylvie_fx.DistributedModule(
                own, sylvie_fx.Options(seed=seed, warm_up=1, **given), sylvie_fx.default_passes(), transport, cache
            )
            nets.append((net, net.shard(graph.x, graph.edge_index, graph.y, graph.train_mask, partition=assignment)))

        def gradient(which: int) -> Tensor:
            net, (x, edges, y, fit) = nets[which]
            own.zero_grad()
            loss = F.cross_entropy(net(x, edges)[fit], y[fit])
            loss.backward()
            return torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])

        optimizer = torch.optim.Adam(own.parameters(), lr=setting.rate)
        seen: list[tuple[float, float]] = []
        for step in range(1, max(points) + 1):
            watched = any(point - WINDOW < step <= point for point in points)
            exact = gradient(0) if watched else None
            coded = gradient(1)
            if exact is not None:
                seen.append((float((coded - exact).norm() / exact.norm()), float(F.cosine_similarity(coded, exact, 0))))
            optimizer.step()
        windows = (seen[i : i + WINDOW] for i in range(0, len(seen), WINDOW))
        return [(statistics.mean(e for e, _ in w), statistics.mean(c for _, c in w)) for w in windows]

    return run_ranks(parts, rank, 600.0)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=["block model", "cora"], choices=list(MODELS))
    parser.add_argument("--points", nargs="*", type=int, default=[5, 20, 60, 100], help="steps, WINDOW or more apart")
    parser.add_argument("--parts", default="8 random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write docs/gradients.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    number, partition = arguments.parts.split()
    text = [
        "# Fidelity of the gradient\n\nMade by `python benchmarks/gradients.py --write`.\n",
        (__doc__ or "").split("\n\n", 2)[2],
    ]
    for name in arguments.data:
        setting = replace(settings()[name], dropout=0.0, first=0.0)
        steps = [f"step {point}" for point in arguments.points]
        text += [f"\n{name}, {MODELS[name]}, {arguments.parts} parts; relative error (cosine)\n",
                 f"\n| code | {' | '.join(steps)} |\n| --- | {' | '.join('---:' for _ in steps)} |\n"]  # fmt: skip
        print("".join(text[-2:]), end="", flush=True)
        for scheme, options in SCHEMES.items():
            found = fidelity(setting, MODELS[name], int(number), partition, arguments.points, options, arguments.seed)
            cells = (f"{error:.3f} ({cosine:.4f})" for error, cosine in found)
            text.append(f"| {scheme} | {' | '.join(cells)} |\n")
            print(text[-1], end="", flush=True)
    if arguments.write:
        (Path(__file__).resolve().parents[1] / "docs" / "gradients.md").write_text("".join(text))


if __name__ == "__main__":
    main()
