"""What each rank of benchmarks/link.py runs, started by it: all variants in one process, in turns."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from link_timelines import record, simulated_step
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.graphs.generators import random_graph
from sylvie_fx.runtime.process_group import ProcessGroupTransport
from sylvie_fx.runtime.transport import Pending, ReduceOp, Transport

TIMEOUT = 600.0
#: Bits a second that the compiler counts with where no rate is set: what namespaces of one machine reach.
UNLIMITED = 10e9


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        name: How the table calls it.
        kind: ``dgl`` or ``pyg`` on one device, ``ranks``, or ``bound``: ranks whose exchanges are nothing.
        options: Options of distribute().
        overlap: Whether exchanges are split in two halves that are moved apart.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    overlap: bool = False


VARIANTS = (
    Variant("DGL, one device", "dgl"),
    Variant("PyG, one device", "pyg"),
    Variant("float32 sync", "ranks", {"bits": 32, "staleness": 0}),
    Variant("1 bit sync", "ranks", {"bits": 1, "staleness": 0}),
    Variant("1 bit overlapped", "ranks", {"bits": 1, "staleness": 0}, True),
    Variant("1 bit stale", "ranks", {"bits": 1, "staleness": 1}, True),
    Variant("1 bit auto", "ranks", {"bits": 1, "staleness": "auto"}, True),
    Variant("bound: no exchange", "bound", {"bits": 32, "staleness": 0}),
    Variant("bound, in two halves", "bound", {"bits": 32, "staleness": 0}, True),
)


class Layers(nn.Module):
    """Convolutions with ReLU between them, over DGL (graph first) or PyG."""

    def __init__(self, convs: Sequence[nn.Module], graph_first: bool) -> None:
        super().__init__()
        self.convs, self.graph_first = nn.ModuleList(convs), graph_first

    def forward(self, a: Any, b: Any) -> Tensor:
        graph, x = (a, b) if self.graph_first else (b, a)
        for i, conv in enumerate(self.convs):
            x = F.relu(x) if i else x
            if isinstance(conv, nn.Linear):
                x = conv(x)
            else:
                x = conv(graph, x) if self.graph_first else conv(x, graph)
        return x


class NoWire:
    """A transport whose exchanges deliver zeros at once, once it is ``silent``; before, it is the real one.

    Clearing the buffers is no part of the local compute: ``cleared_s`` adds up what it took.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.silent, self.cleared_s = inner, False, 0.0
        self.rank, self.size, self.timeout = inner.rank, inner.size, inner.timeout
        self.threaded = self.processes = False  # there is nothing to hide, and nothing takes its time
        self.host = inner.host

    bytes_sent = property(lambda self: self.inner.bytes_sent)
    messages_sent = property(lambda self: self.inner.messages_sent)

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str) -> Pending:
        if not self.silent:
            return self.inner.exchange(sends, receives, label)
        start = time.perf_counter()
        for buffer in receives:
            if buffer is not None:
                buffer.zero_()
        self.cleared_s += time.perf_counter() - start
        return _Done()

    def all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Tensor:
        return tensor.detach().clone() if self.silent else self.inner.all_reduce(tensor, label, op)

    def start_all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        return (
            (lambda: self.all_reduce(tensor, label, op))
            if self.silent
            else self.inner.start_all_reduce(tensor, label, op)
        )

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        return [value] * self.size if self.silent else self.inner.all_gather_object(value, label)

    def barrier(self, label: str) -> None:
        if not self.silent:
            self.inner.barrier(label)

    def next_number(self, name: str) -> int:
        return self.inner.next_number(name)

    def refuse(self, reason: str) -> None:
        """See Transport.refuse."""
        self.inner.refuse(reason)

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()


class _Done:
    def wait(self, timeout: float | None = None) -> None:
        del timeout

    def done(self) -> bool:
        return True


def pipeline(overlap: bool) -> sylvie_fx.PassManager:
    """The default passes, without those that let communication overlap where that is not wanted."""
    passes = sylvie_fx.default_passes()
    return passes if overlap else passes.without("split-exchanges", "schedule", "bucket-gradients")


class Trainer:
    """One variant: a model, its data and an optimizer.

    Attributes:
        model: The module that trains, distributed or not.
    """

    def __init__(self, variant: Variant, module: nn.Module, data: tuple[Any, ...], y: Tensor, mask: Tensor,
                 transport: Transport, partition: str, rate: float = 0.01, decay: float = 0.0,
                 link: float | str = "auto") -> None:  # fmt: skip
        self.quiet = NoWire(transport) if variant.kind == "bound" else None
        self.model: nn.Module = module
        if variant.kind in ("ranks", "bound"):
            passes, wire = pipeline(variant.overlap), self.quiet or transport
            self.model = sylvie_fx.distribute(module, passes=passes, transport=wire, link=link, **variant.options)
            *shards, y, mask = self.model.shard(*data, y, mask, partition=partition)
            data = tuple(shards)
        self.data, self.y, self.mask = data, y, mask
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, weight_decay=decay)

    def epoch(self) -> tuple[float, float]:
        """A training step on the whole graph; gives its seconds, and those of the processor."""
        start, cpu = time.perf_counter(), time.process_time()
        cleared = self.quiet.cleared_s if self.quiet else 0.0
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(*self.data)[self.mask], self.y[self.mask]).backward()
        self.optimizer.step()
        took, worked = time.perf_counter() - start, time.process_time() - cpu
        cleared = self.quiet.cleared_s - cleared if self.quiet else 0.0
        return took - cleared, worked - cleared


@dataclass
class Outcome:
    """What a variant took.

    Attributes:
        refused: Why it does not run, or None.
        seconds: Of each counted epoch, of the slowest rank.
        cpu_s: The same of processor time, all threads of the process.
        sent: Bytes that a rank sent in an epoch, exchanges and reductions, the mean over ranks.
        wait_s: Seconds that a rank waited in an epoch, the mean over ranks.
        simulated_s: Seconds of the model's step by simulation, from the least time of each operator; None on one device.
        computed_s: The operators' part of it.
    """

    refused: str | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sent: float = 0.0
    wait_s: float = 0.0
    simulated_s: float | None = None
    computed_s: float | None = None


def one_device(
    variant: Variant, convs: Callable[[str], list[nn.Module]], x: Tensor, index: Tensor
) -> tuple[nn.Module, tuple[Any, ...]]:
    """The unmodified model of a framework and what it is called with."""
    if variant.kind != "dgl":
        return Layers(convs("pyg"), False), (x, index)
    import sylvie_fx.dgl  # noqa: F401  makes DGL importable

    import dgl  # isort: skip

    graph = dgl.add_self_loop(dgl.graph((index[0], index[1]), num_nodes=len(x)))
    graph.create_formats_()
    return Layers(convs("dgl"), True), (graph, x)


def layers(model: str, sizes: Sequence[int]) -> Callable[[str], list[nn.Module]]:
    """The layers of a model as a framework has them: GCN with these widths, or two linear layers and ten steps of APPNP."""

    def make(framework: str) -> list[nn.Module]:
        torch.manual_seed(0)
        if framework == "dgl":
            from dgl.nn import APPNPConv as APPNP
            from dgl.nn import GraphConv as GCN
        else:
            from torch_geometric.nn import APPNP
            from torch_geometric.nn import GCNConv as GCN
        if model == "appnp":
            return [nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[-1]), APPNP(10, 0.1)]
        return [GCN(a, b) for a, b in itertools.pairwise(sizes)]

    return make


def measure(config: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """Blocks of epochs of all variants in turns.

    A block belongs to one variant, since what a stale variant sends in one epoch may arrive during the next; the first
    epoch of a block, whose messages crossed before it began, is not counted, nor are the steps of the warm-up.
    """
    graph = random_graph(config["nodes"], config["edges"], config["features"], config["classes"])
    index = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]]
    sizes = [config["features"], *[config["hidden"]] * (config["layers"] - 1), config["classes"]]
    chosen = [v for v in VARIANTS if v.name in config["variants"]]
    outcomes = {v.name: Outcome() for v in chosen}
    trainers: dict[str, Trainer] = {}
    for variant in chosen:
        alone = variant.kind in ("dgl", "pyg")
        if alone and transport.rank:
            continue
        module, data = one_device(variant, layers(config["model"], sizes), graph.x, index)
        try:
            link = (config["bits"] or UNLIMITED) / 1e9
            trainers[variant.name] = Trainer(
                variant, module, data, graph.y, graph.train_mask, transport, "random", link=link
            )
        except sylvie_fx.SylvieError as error:
            outcomes[variant.name].refused = str(error)
    warm = sylvie_fx.Options().warm_up + 1
    for number in range(config["rounds"] + 1):
        for name, trainer in trainers.items() if transport.rank == 0 else _with_gaps(chosen, trainers):
            transport.barrier(f"block {name}")
            if trainer is not None:
                _block(trainer, outcomes[name], config["epochs"] if number else warm, counted=number > 0)
    gathered = transport.all_gather_object({n: asdict(o) for n, o in outcomes.items()}, "outcomes")
    rate = wire_rate(transport)
    runs = {n: (t.model, t.epoch) for n, t in trainers.items() if t.quiet is None}
    for name, timeline, schedule in record(runs, config["timelines"]):
        simulated = simulated_step(timeline, schedule, (config["bits"] or rate) / 8, transport.threaded)
        for one in gathered:
            one[name]["simulated_s"], one[name]["computed_s"] = simulated
    halo = _halo_rows(trainers)
    return {
        "variants": _merge(gathered),
        "wire": rate,
        "halo": transport.all_gather_object(halo, "halo"),
    }


def _with_gaps(chosen: Sequence[Variant], trainers: dict[str, Trainer]) -> list[tuple[str, Trainer | None]]:
    """As rank 0 has them, with nothing to do where it runs alone."""
    alone = [v.name for v in chosen if v.kind in ("dgl", "pyg")]
    return [(v.name, trainers.get(v.name)) for v in chosen if v.name in trainers or v.name in alone]


def _block(trainer: Trainer, outcome: Outcome, epochs: int, counted: bool) -> None:
    took = []
    for number in range(epochs):
        if number == 1 and isinstance(trainer.model, sylvie_fx.DistributedModule):
            trainer.model.reset_stats()
        took.append(trainer.epoch())
    if not counted:
        if trainer.quiet:
            trainer.quiet.silent = True
        return
    outcome.seconds += [seconds for seconds, _ in took[1:]]
    outcome.cpu_s += [cpu for _, cpu in took[1:]]
    if isinstance(trainer.model, sylvie_fx.DistributedModule):
        stats = trainer.model.stats
        outcome.sent = (stats.bytes_sent + stats.bytes_reduced) / (epochs - 1) if trainer.quiet is None else 0.0
        outcome.wait_s = stats.wait_s / (epochs - 1)


def _merge(gathered: list[dict[str, Any]]) -> dict[str, Any]:
    merged = {}
    for name, first in gathered[0].items():
        ranks = [one[name] for one in gathered if one[name]["seconds"]]
        merged[name] = first | {
            **{
                key: [max(epoch) for epoch in zip(*(r[key] for r in ranks), strict=True)]
                for key in ("seconds", "cpu_s")
            },
            "sent": sum(r["sent"] for r in ranks) / max(len(ranks), 1),
            "wait_s": sum(r["wait_s"] for r in ranks) / max(len(ranks), 1),
        }
    return merged


def _halo_rows(trainers: dict[str, Trainer]) -> int:
    """Rows of other ranks that this rank needs."""
    for trainer in trainers.values():
        if isinstance(trainer.model, sylvie_fx.DistributedModule):
            return max((p.halo for _, b in trainer.model.engine.bound() for p in b.plans.values()), default=0)
    return 0


def wire_rate(transport: Transport, size: int = 16 << 20) -> float:
    """Bits a second that each rank sends when all send to all at once, the best of three."""
    message = torch.zeros(size // 4)
    inbox = [torch.empty_like(message) for _ in range(transport.size)]
    best = 0.0
    for _ in range(3):
        transport.barrier("rate")
        start = time.perf_counter()
        transport.exchange([message] * transport.size, inbox, "rate").wait()
        best = max(best, 8.0 * size * (transport.size - 1) / (time.perf_counter() - start))
    return best


def accuracy(config: dict[str, Any], transport: Transport) -> dict[str, Any]:
    """Train each variant on a data set; the parameters of every epoch are judged afterwards, on one device.

    An evaluation between two steps would be a synchronous exchange, and stale variants would never be stale.
    """
    from accuracy import make, settings

    setting = settings()[config["data"]]
    graph = setting.graph(config["seed"])
    torch.manual_seed(config["seed"])
    original = make(config["model"], graph, setting.hidden, setting.layers, setting.dropout, setting.first)
    found: dict[str, Any] = {}
    for variant in [v for v in VARIANTS if v.name in config["variants"] and v.kind == "ranks"]:
        data = (graph.x, graph.edge_index)
        try:
            trainer = Trainer(variant, copy.deepcopy(original), data, graph.y, graph.train_mask, transport,
                              config["partition"], setting.rate, setting.decay)  # fmt: skip
        except sylvie_fx.SylvieError as error:
            found[variant.name] = {"refused": str(error)}
            continue
        states, seconds = [], []
        transport.barrier(f"train {variant.name}")
        for _ in range(setting.epochs):
            seconds.append(trainer.epoch()[0])
            states.append({k: v.clone() for k, v in trainer.model.state_dict().items()})
        seconds = [max(epoch) for epoch in zip(*transport.all_gather_object(seconds, "seconds"), strict=True)]
        if transport.rank == 0:
            found[variant.name] = {"seconds": seconds, "test": _judge(original, states, graph)}
        transport.barrier(f"judged {variant.name}")
    return found


@torch.no_grad()
def _judge(original: nn.Module, states: list[dict[str, Tensor]], graph: Any) -> list[float]:
    """Test accuracy of each state, per cent."""
    judge, found = copy.deepcopy(original).eval(), []
    for state in states:
        judge.load_state_dict(state)
        right = judge(graph.x, graph.edge_index).argmax(1) == graph.y
        found.append(100 * right[graph.test_mask].float().mean().item())
    return found


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    transport = ProcessGroupTransport.from_environment(TIMEOUT)
    result = (measure if config["task"] == "measure" else accuracy)(config, transport)
    if transport.rank == 0:
        Path(config["result"]).write_text(json.dumps(result))
    transport.barrier("end")
    transport.close()


if __name__ == "__main__":
    main()
