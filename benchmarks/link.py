"""Epochs over links of a given rate: one thread a rank, one network namespace a rank, gloo between them. Needs root.

    sudo .venv/bin/python benchmarks/link.py [--ranks 2] [--rates 1gbit 10gbit unlimited] [--json FILE]
    sudo .venv/bin/python benchmarks/link.py --time-to-accuracy [--data cora …] [--models GCN SAGE]

The first form trains on a random graph (--model, --nodes, --edges, --features, --hidden, --classes) and prints a table for
each rate. Variants run in turns, in blocks whose first epoch is not counted; medians of the slowest rank, spread (largest
less smallest) in brackets. "CPU ms" is the least processor time of an epoch, which other load on the machine disturbs less.
Bytes and waiting are an epoch's, of one rank. "bound" is the float32 program whose exchanges deliver zeros at once: local
compute alone; of its two forms the faster counts. "wire time gone" is the share of float32 sync's time above the bound that
a variant does not spend. "simulated" is a step of the model alone (docs/hidden.md) from the least time that each operator
took, on a link of that rate, and in brackets what it is of the operators' time: nearly free of the load of the machine.

The second form trains on real graphs, judges the parameters of every epoch on one device, and prints epochs and seconds
until the test accuracy is within one point of the best that float32 sync reaches (medians over --seeds). Seconds are epochs
times the median epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from link_network import RATES, NoNetwork, network
from link_rank import VARIANTS
from rich.console import Console
from rich.table import Table

BASE = "float32 sync"


def run(options: argparse.Namespace, rate: str, config: dict[str, Any]) -> dict[str, Any]:
    """Start the ranks in their namespaces and give what rank 0 wrote.

    Raises:
        NoNetwork: There can be no namespaces here.
        SystemExit: A rank failed; its traceback has been printed.
    """
    with tempfile.TemporaryDirectory() as folder, network(options.ranks, rate) as net:
        result, task = Path(folder) / "result.json", Path(folder) / "task.json"
        task.write_text(json.dumps({**config, "result": str(result), "variants": options.variants}))
        processes = net.start(Path(__file__).with_name("link_rank.py"), [str(task)], {})
        try:
            codes = [process.wait(options.timeout) for process in processes]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"a rank did not end within {options.timeout:g} s") from None
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return dict(json.loads(result.read_text()))


def epochs_table(options: argparse.Namespace, rate: str, found: dict[str, Any]) -> Table:
    """One rate's rows."""
    variants = found["variants"]
    median = {name: statistics.median(v["seconds"]) for name, v in variants.items() if v["seconds"]}
    base = median.get(BASE)
    bound = min((median[v.name] for v in VARIANTS if v.kind == "bound" and v.name in median), default=None)
    share = f"; float32 sync spends {100 * (1 - bound / base):.1f}% in communication" if base and bound else ""
    widths = [
        options.features,
        *[options.hidden] * (options.layers - 1 if options.model == "gcn" else 1),
        options.classes,
    ]
    shape = options.model.upper() + " " + "-".join(map(str, widths))
    table = Table(
        title=f"{options.ranks} ranks, {rate} ({found['wire'] / 1e9:.2f} Gbit/s measured, both ways at once): "
        f"{shape}, random graph of {options.nodes:,} nodes and "
        f"{options.edges:,} edges, random parts, load {os.getloadavg()[0]:.0f}, halo {'/'.join(f'{h:,}' for h in found['halo'])} rows{share}",
        title_justify="left",
    )
    columns = " |ms an epoch|CPU ms|MB sent|ms waited|x bound|speed-up|of possible|wire time gone|simulated ms"
    for column in columns.split("|"):
        table.add_column(column, justify="left" if column == " " else "right")
    for name, variant in variants.items():
        if name not in median:
            table.add_row(name, variant["refused"] or "did not run", *[""] * 8)
            continue
        seconds, own, simulated = variant["seconds"], median[name], variant["simulated_s"]
        ranked = name in {v.name for v in VARIANTS if v.kind == "ranks"}
        gone = (
            f"{100 * (1 - (own - bound) / (base - bound)):.1f}%"
            if base and bound and ranked and base > 1.1 * bound
            else ""
        )
        table.add_row(
            name,
            f"{1e3 * own:.1f} ({1e3 * (max(seconds) - min(seconds)):.1f})",
            f"{1e3 * min(variant['cpu_s']):.1f}",
            f"{variant['sent'] / 1e6:.2f}" if ranked else "",
            f"{1e3 * variant['wait_s']:.1f}" if ranked else "",
            f"{own / bound:.2f}" if bound else "",
            f"{base / own:.2f}" if base else "",
            f"{100 * bound / own:.0f}%" if bound and ranked else "",
            gone,
            f"{1e3 * simulated:.1f} ({simulated / variant['computed_s']:.2f} x)" if simulated else "",
        )
    return table


def accuracy_rows(table: Table, title: str, runs: list[dict[str, Any]]) -> None:
    """One data set's rows over several seeds; the target of a seed is its float32 sync's best less one point."""
    for name, first in runs[0].items():
        if "refused" in first:
            table.add_row(title, name, first["refused"], "", "", "")
            continue
        epoch = statistics.median(s for run in runs for s in run[name]["seconds"][2:])
        best = statistics.mean(max(run[name]["test"]) for run in runs)
        epochs = [
            e for run in runs if (e := _reached(run[name]["test"], run.get(BASE, {}).get("test", []))) is not None
        ]
        middle = statistics.median(epochs) if epochs else None
        table.add_row(
            title, name, f"{best:.1f}", f"{1e3 * epoch:.1f}",
            "never" if middle is None else f"{middle:g}" + (f" ({len(epochs)} of {len(runs)})" if len(epochs) < len(runs) else ""),
            "" if middle is None else f"{middle * epoch:.2f}",
        )  # fmt: skip


def _reached(test: list[float], base: list[float]) -> int | None:
    """The first epoch, counted from 1, within one point of the best of the base."""
    return next((i + 1 for i, t in enumerate(test) if base and t >= max(base) - 1.0), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of namespaces")
    parser.add_argument("--rates", nargs="+", choices=RATES, default=["1gbit", "10gbit", "unlimited"])
    parser.add_argument("--variants", nargs="+", choices=[v.name for v in VARIANTS], default=[v.name for v in VARIANTS])
    parser.add_argument("--model", choices=["gcn", "appnp"], default="appnp")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--edges", type=int, default=60_000)
    parser.add_argument("--features", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--classes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each variant")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of a block, of which the first is not counted")
    parser.add_argument("--timelines", type=Path, help="record three epochs of each variant in this folder")
    parser.add_argument("--time-to-accuracy", action="store_true")
    parser.add_argument("--data", nargs="+", default=["cora", "amazon_photo", "coauthor_cs", "wordnet"])
    parser.add_argument("--models", nargs="+", default=["GCN"], choices=["GCN", "SAGE", "GAT", "GIN"])
    parser.add_argument("--partition", default="metis", help="of the real graphs")
    parser.add_argument("--seeds", type=int, default=1, help="of the real graphs; medians over them")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one rate or data set")
    parser.add_argument("--json", type=Path, help="also write every measurement to a file")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    if options.timelines:
        options.timelines.mkdir(parents=True, exist_ok=True)
    try:
        if options.time_to_accuracy:
            time_to_accuracy(options, records)
        else:
            for rate in options.rates:
                sizes = ("model", "nodes", "edges", "features", "hidden", "layers", "classes", "rounds", "epochs")
                config = {"task": "measure", **{name: getattr(options, name) for name in sizes}}
                config["timelines"] = f"{options.timelines.resolve()}/{rate}-" if options.timelines else ""
                config["bits"] = RATES[rate]
                records.append({"rate": rate, **run(options, rate, config)})
                Console(width=None if sys.stdout.isatty() else 160).print(epochs_table(options, rate, records[-1]))
    except NoNetwork as error:
        sys.exit(str(error))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


def time_to_accuracy(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """One table over all data sets for each rate."""
    for rate in options.rates:
        table = Table(
            title=f"{options.ranks} ranks, {rate}, {options.partition} parts: within a point of the float32 sync best"
        )
        for column in ("", "variant", "best test %", "ms an epoch", "epochs", "seconds"):
            table.add_column(column, justify="left" if column in ("", "variant") else "right")
        for data in options.data:
            for model in options.models:
                config = {"task": "accuracy", "data": data, "model": model, "partition": options.partition}
                found = [run(options, rate, {**config, "seed": seed}) for seed in range(options.seeds)]
                records.append({"rate": rate, "data": data, "model": model, "seeds": found})
                accuracy_rows(table, f"{data} {model}", found)
        Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
