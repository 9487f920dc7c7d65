"""The command line: ``python -m sylvie_fx run | doctor | partition | explain | verify | bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import sylvie_fx
from sylvie_fx import bench, doctor
from sylvie_fx.explain_script import explain_script
from sylvie_fx.graphs.book import partition
from sylvie_fx.graphs.datasets import available, load_npz
from sylvie_fx.ir.errors import PartitionError, SylvieError
from sylvie_fx.runtime.launch import Launch, LaunchResult, launch
from sylvie_fx.script import load_script
from sylvie_fx.verify import verify

_COLOURS = {doctor.State.OK: "green", doctor.State.ABSENT: "yellow", doctor.State.BROKEN: "red"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name, or None for that of the process.

    Returns:
        The exit status: 0, 1 where something failed or is not exact, 2 for a command line that can not be understood;
        ``run`` and ``bench`` give that of the first process that failed.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (SylvieError, FileNotFoundError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]{type(error).__name__}[/]: ", end="")
        print(error, file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sylvie_fx", description=sylvie_fx.__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    run = _command(commands, "run", _run, "start a script on several local processes")
    _launch_options(run)
    run.add_argument("--timeout", type=float, help="seconds that a rank waits for another (SYLVIE_FX_TIMEOUT)")
    run.add_argument("--bits", type=int, help="bits a value on the wire (SYLVIE_FX_BITS)")
    run.add_argument("--staleness", help="steps that a halo row may be old, or auto (SYLVIE_FX_STALENESS)")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own command line")

    _command(commands, "doctor", _doctor, "show what works on this machine")

    split = _command(commands, "partition", _partition, "split a graph once, for all ranks to load")
    split.add_argument("graph", help="name of a graph that `doctor` lists, or a .npz, .npy or .pt file")
    split.add_argument("--parts", type=int, required=True)
    split.add_argument("--method", default="metis", choices=["metis", "contiguous", "random"])
    split.add_argument("--seed", type=int, default=0)
    split.add_argument("--balance", type=float, default=1.03, help="largest part relative to the mean")
    split.add_argument("--nodes", type=int, help="number of nodes, if the last ones have no edges")
    split.add_argument(
        "--output", "-o", type=Path, help="where to write the book; without it the quality is shown only"
    )

    verify = _command(commands, "verify", _verify, "compare simulated ranks with one device, for a script's build()")
    verify.add_argument("script", type=Path)
    verify.add_argument("--parts", type=int, default=4)

    explain = _command(commands, "explain", _explain, "show what a script's build() would exchange")
    explain.add_argument("script", type=Path)
    explain.add_argument("--parts", type=int, default=2)
    explain.add_argument("--bits", type=_bits, default=32, help="1, 2, 4, 8, 16, 32 or auto")
    explain.add_argument("--program", action="store_true", help="print the rewritten program too")

    measure = _command(commands, "bench", _bench, "measure the wire between local processes")
    _launch_options(measure)
    measure.add_argument("--megabytes", type=float, default=16.0, help="largest message")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run)
    return parser


def _launch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, help="threads of each process; the cores are shared without it")


def _run(options: argparse.Namespace) -> int:
    wanted = {
        f"SYLVIE_FX_{name.upper()}": str(value)
        for name in ("timeout", "bits", "staleness")
        if (value := getattr(options, name)) is not None
    }
    what = Launch(options.script, options.arguments, options.processes, options.threads, wanted)
    return _report(launch(what))


def _report(result: LaunchResult) -> int:
    for failure in result.failures:
        print(f"sylvie_fx: {failure}", file=sys.stderr)
    return result.exitcode


def _doctor(options: argparse.Namespace) -> int:
    del options
    findings = doctor.examine()
    table = Table(title="sylvie_fx doctor", title_justify="left")
    for column in ("", "state", "detail"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.state]
        table.add_row(finding.name, f"[{colour}]{finding.state.value}[/]", finding.detail)
    Console().print(table)
    return int(any(finding.state is doctor.State.BROKEN for finding in findings))


def _partition(options: argparse.Namespace) -> int:
    edge_index, known = _read_edges(options.graph)
    book = partition(
        edge_index,
        options.parts,
        method=options.method,
        seed=options.seed,
        balance=options.balance,
        num_nodes=options.nodes if options.nodes is not None else known,
    )
    print(book)
    if options.output is not None:
        book.save(options.output)
        print(f"written to {options.output}")
    return 0


def _read_edges(graph: str) -> tuple[torch.Tensor, int | None]:
    """The edge_index that a name or file stands for, and the number of nodes where the file tells it."""
    path = Path(graph)
    if not path.suffix:
        data = load_npz(graph)
        return data.edge_index, data.num_nodes
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {graph}; graphs by name are {', '.join(available()) or 'not here'}")
    loaded: Any = torch.load(path, weights_only=True) if path.suffix == ".pt" else np.load(path, allow_pickle=False)
    known = None
    if not isinstance(loaded, torch.Tensor | np.ndarray):
        if "edge_index" not in loaded:
            raise PartitionError(
                f"{graph} has no edge_index", remedy="store an integer array of shape (2, E) under that name"
            )
        known = next((len(loaded[name]) for name in ("y", "x") if name in loaded), None)
        loaded = loaded["edge_index"]
    return torch.as_tensor(loaded), known


def _verify(options: argparse.Namespace) -> int:
    script = load_script(options.script)
    report = verify(script.model, *script.data, parts=options.parts, loss=script.loss)
    print(report)
    return 0 if report.exact else 1


def _explain(options: argparse.Namespace) -> int:
    print(explain_script(options.script, parts=options.parts, bits=options.bits, program=options.program))
    return 0


def _bits(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _bench(options: argparse.Namespace) -> int:
    what = Launch(Path(bench.__file__), [str(options.megabytes)], options.processes, options.threads)
    return _report(launch(what))
