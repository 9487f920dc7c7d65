"""The face of a distributed model: calls, inputs, outputs, state, programs, counters."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.api import DistributedModule
from sylvie_fx.debug import DebugOptions
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import CaptureError, OptionError, PartitionError, SylvieError
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.machine import Machine

NODES, EDGES = 23, 60


class Net(nn.Module):
    def __init__(self, features: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(features, 8), nn.Linear(8, classes)
        self.slope = 0.1

    def aggregate(self, h: Tensor, edge_index: Tensor) -> Tensor:
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        h = F.leaky_relu(self.one(x), self.slope)
        messages = h[edge_index[0]]
        if edge_weight is not None:
            messages = messages * edge_weight[:, None]
        return self.two(h + torch.zeros_like(h).index_add(0, edge_index[1], messages))


def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 4, generator=generator)
    edge_index = torch.randint(0, NODES, (2, EDGES), generator=generator)
    y = torch.randint(0, 3, (NODES,), generator=generator)
    return x, edge_index, y, torch.rand(NODES, generator=generator) < 0.5


def on_ranks(fn: Callable[[Any], Any], model: nn.Module, parts: int = 2, **options: Any) -> list[Any]:
    cache = ProgramCache()

    def rank(transport: Any) -> Any:
        chosen = Options(timeout=30, **options)
        return fn(DistributedModule(copy.deepcopy(model), chosen, default_passes(), transport, cache))

    return run_ranks(parts, rank, 30)


def train(net: Any, x: Any, edge_index: Any, y: Any, mask: Any, steps: int = 2) -> float:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, edge_index)[mask], y[mask])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_one_process_needs_no_process_group() -> None:
    torch.manual_seed(0)
    net = Net()
    expected = train(copy.deepcopy(net), *data())
    distributed = sylvie_fx.distribute(net)
    assert train(distributed, *distributed.shard(*data())) == pytest.approx(expected, rel=1e-6)


def test_state_is_the_original_models() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # made before
    distributed = sylvie_fx.distribute(net)
    assert list(distributed.state_dict()) == list(net.state_dict())
    assert all(a is b for a, b in zip(distributed.parameters(), net.parameters(), strict=True))
    x, edge_index, y, mask = distributed.shard(*data())
    before = net.one.weight.detach().clone()
    F.cross_entropy(distributed(x, edge_index)[mask], y[mask]).backward()
    optimizer.step()
    assert not torch.equal(net.one.weight, before)
    other = sylvie_fx.distribute(Net())
    other.load_state_dict(distributed.state_dict())
    assert torch.equal(other.module.one.weight, net.one.weight)


def test_attributes_reach_the_original_model_and_the_program() -> None:
    net = Net()
    distributed = sylvie_fx.distribute(net)
    x, edge_index, *_ = distributed.shard(*data())
    assert distributed.slope == 0.1
    distributed.slope = 0.9
    assert net.slope == 0.9
    torch.testing.assert_close(distributed(x, edge_index).full(), net(*data()[:2]).detach())
    net.slope = -0.5
    torch.testing.assert_close(distributed(x, edge_index).full(), net(*data()[:2]).detach())


def test_a_copy_shares_programs_and_has_its_own_parameters() -> None:
    distributed = sylvie_fx.distribute(Net())
    x, edge_index, y, mask = distributed.shard(*data())
    train(distributed, x, edge_index, y, mask)
    best = copy.deepcopy(distributed)
    kept = best(x, edge_index).full()
    train(distributed, x, edge_index, y, mask)
    torch.testing.assert_close(best(x, edge_index).full(), kept)
    assert not torch.allclose(distributed(x, edge_index).full(), kept)
    assert best.engine.cache is distributed.engine.cache


def test_a_distributed_model_is_not_pickled() -> None:
    with pytest.raises(SylvieError, match="state_dict"):
        torch.save(sylvie_fx.distribute(Net()), "/dev/null")


class Outputs(Net):
    def forward(
        self, x: Tensor, edge_index: Tensor, *, scale: float = 1.0, more: dict[str, Tensor] | None = None
    ) -> Any:  # type: ignore[override]
        out = super().forward(x, edge_index) * scale
        if more is not None:
            out = out + more["bias"]
        return {
            "logits": out,
            "both": (out.mean(0), out.sum()),
            "name": "net",
            "edges": out[edge_index[0]],
            "none": None,
        }


def test_several_outputs_and_keyword_inputs() -> None:
    torch.manual_seed(1)
    net = Outputs()
    x, edge_index, *_ = data()
    bias = torch.randn(NODES, 3)
    expected = net(x, edge_index, scale=2.0, more={"bias": bias})

    def run(model: Any) -> Any:
        own_x, own_edges, own_bias = model.shard(x, edge_index, bias)
        out = model(own_x, edge_index=own_edges, scale=2.0, more={"bias": own_bias})
        return out["logits"].full(), out["both"], out["name"], out["edges"].full(), out["none"]

    for logits, (mean, total), name, edges, none in on_ranks(run, net, 3):
        torch.testing.assert_close(logits, expected["logits"].detach())
        torch.testing.assert_close(mean, expected["both"][0])
        torch.testing.assert_close(total, expected["both"][1])
        torch.testing.assert_close(edges, expected["edges"].detach())
        assert (name, none) == ("net", None)


def test_train_and_eval_are_two_programs() -> None:
    class Dropping(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(F.dropout(x, 0.5, self.training), edge_index)

    net = Dropping()
    distributed = sylvie_fx.distribute(net)
    x, edge_index, *_ = distributed.shard(*data())
    first, second = distributed(x, edge_index).full(), distributed(x, edge_index).full()
    assert not torch.allclose(first, second)
    distributed.eval()
    assert not net.training
    with torch.no_grad():
        torch.testing.assert_close(distributed(x, edge_index).full(), net(*data()[:2]))
    assert "node_dropout" in str(distributed.program("train"))
    assert "node_dropout" not in str(distributed.program("eval"))


def test_frozen_and_unused_parameters() -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))
            self.one.weight.requires_grad_(False)

    net = Unused()

    def run(model: Any) -> Any:
        x, edge_index, y, mask = model.shard(*data())
        F.cross_entropy(model(x, edge_index)[mask], y[mask]).backward()
        first = [p.grad is None for p in model.parameters()]
        model.one.weight.requires_grad_(True)
        F.cross_entropy(model(x, edge_index)[mask], y[mask]).backward()
        return first, model.one.weight.grad

    x, edge_index, y, mask = data()
    net.one.weight.requires_grad_(True)
    F.cross_entropy(net(x, edge_index)[mask], y[mask]).backward()
    expected = net.one.weight.grad
    net.zero_grad()
    net.one.weight.requires_grad_(False)
    for missing, gradient in on_ranks(run, net):
        assert (
            missing == [True, True, False, False, False] or missing == [True, True, False, False, False][: len(missing)]
        )
        torch.testing.assert_close(gradient, expected)


# --- programs, counters, options ------------------------------------------------------------------------------------


def test_programs_say_what_to_call_first() -> None:
    distributed = sylvie_fx.distribute(Net())
    for look in (lambda: distributed.program("eval"), lambda: distributed.snapshots, distributed.explain):
        with pytest.raises(CaptureError, match="call the model once in"):
            look()


def test_program_snapshots_and_explain() -> None:
    def run(model: Any) -> tuple[str, list[str], str]:
        train(model, *model.shard(*data(), partition="random"), steps=1)
        return str(model.program("train")), [s.name for s in model.snapshots], model.explain()

    program, names, table = on_ranks(run, Net())[0]
    assert "sylvie.halo_" in program
    assert "test_api.py" in program
    assert names == ["capture", *default_passes().names]
    assert "exchanges of the train program" in table


class Deep(Net):
    """Two aggregations: the second one's rows cross in every step, forward and backward; the first one's only once."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:  # type: ignore[override]
        h = self.two(self.aggregate(self.one(x), edge_index).relu())
        return self.aggregate(h, edge_index)


@pytest.mark.parametrize("bits", [32, 1])
def test_stats_count_exchanges_and_bytes(bits: int) -> None:
    def run(model: Any) -> Any:
        sharded = model.shard(*data(), partition="random")
        train(model, *sharded, steps=1)
        model.reset_stats()
        assert model.stats.exchanges == 0
        train(model, *sharded, steps=3)
        return model.stats

    sent = []
    for stats in on_ranks(run, Deep(), 2, bits=bits):
        assert stats.calls == 3
        assert stats.exchanges == 6  # forward and backward
        assert stats.wait_s > 0
        assert stats.bytes_reduced > 0
        assert 0 < stats.bytes_sent < stats.bytes_float32  # which counts the rows that crossed only once in every call
        sent.append(stats.bytes_sent)
    assert len(sent) == 2


def test_debug_options_log_programs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, "sylvie_fx.debug"):
        distributed = sylvie_fx.distribute(Net(), debug=DebugOptions(print="after:sync-gradients"))
        train(distributed, *distributed.shard(*data()), steps=1)
    assert [r.getMessage().split("\n")[0] for r in caplog.records] == ["program after sync-gradients"]
    caplog.clear()
    monkeypatch.setenv("SYLVIE_FX_PRINT", "after-all")
    with caplog.at_level(logging.INFO, "sylvie_fx.debug"):
        distributed = sylvie_fx.distribute(Net())
        train(distributed, *distributed.shard(*data()), steps=1)
    assert any(r.getMessage().startswith("canonicalize") and "+" in r.getMessage() for r in caplog.records)


NEAR = "{}={{'tow': 1}}: there is no module '{}' in the model.* such as 'two'"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: sylvie_fx.distribute(Net(), bit=1), "unknown option bit"),
    (lambda: sylvie_fx.distribute(Net(), bits=3), "bits=3"),
    (lambda: sylvie_fx.distribute(Net(), bits=1.0), r"bits=1\.0\. choose from 1, 2, 4"),
    (lambda: sylvie_fx.distribute(Net(), bits={"forwards": 1}), "no module 'forwards' .* such as 'forward'"),
    (lambda: sylvie_fx.distribute(Net(), bits={"frwrd": 1, "forward": 2}), "no module 'frwrd' .* such as 'forward'"),
    (lambda: sylvie_fx.distribute(Net(), bits={"": {"fwd": 1}}), r"bits\[''\]={'fwd': 1}: there is no direction 'fwd'"),
    (lambda: sylvie_fx.distribute(Net(), eval_bits={"tow": 1}), NEAR.format("eval_bits", "tow")),
    (lambda: sylvie_fx.distribute(Net(), staleness={"tow": 1}), NEAR.format("staleness", "tow")),
    (lambda: sylvie_fx.distribute(Net(), policy={"inter_host": {"bits": {"tow": 1}}}), NEAR.format("bits", "tow")),
    (lambda: sylvie_fx.distribute(Net(), policy={"intra_host": {"bits": {"tow": 1}}}), NEAR.format("bits", "tow")),
    (lambda: sylvie_fx.distribute(Net(), choose_every="10"), "choose_every='10'. give a number"),
    (lambda: sylvie_fx.distribute(Net(), seed=1.5), r"seed=1\.5. give a whole number"),
    (lambda: sylvie_fx.distribute(Net(), staleness=-1), "staleness=-1"),
    (lambda: sylvie_fx.distribute(sylvie_fx.distribute(Net())), "distributed already"),
    (lambda: sylvie_fx.distribute(Net(), debug=DebugOptions(print="after:nothing")), "there is no pass 'nothing'"),
    (lambda: DebugOptions(print="all"), "print='all'"),
    (lambda: default_passes().insert_after("nothing"), "there is no pass 'nothing'"),
])  # fmt: skip
def test_options_are_checked_at_once(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()


def test_options_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYLVIE_FX_BITS", "4")
    monkeypatch.setenv("SYLVIE_FX_TIMEOUT", "7.5")
    assert sylvie_fx.distribute(Net()).options == Options(bits=4, timeout=7.5)
    assert sylvie_fx.distribute(Net(), bits=2).options.bits == 2
    monkeypatch.setenv("SYLVIE_FX_BITS", "few")
    with pytest.raises(OptionError, match="SYLVIE_FX_BITS='few'"):
        sylvie_fx.distribute(Net())


def test_partition_book(tmp_path: Any) -> None:
    x, edge_index, y, mask = data()
    book = sylvie_fx.partition(edge_index, 2, num_nodes=NODES)
    book.save(tmp_path / "two.npz")
    loaded = sylvie_fx.PartitionBook.load(tmp_path / "two.npz")

    def run(model: Any) -> list[int]:
        own, *_ = model.shard(x, edge_index, y, mask, partition=loaded)
        return own.rows.tolist()  # type: ignore[no-any-return]

    rows = on_ranks(run, Net())
    assert [book.assignment[r].unique().tolist() for r in rows] == [[0], [1]]
    with pytest.raises(PartitionError, match="the partition has 2 parts, but there are 3 ranks"):
        on_ranks(run, Net(), 3)


def test_shard_again_joins_the_graph() -> None:
    def run(model: Any) -> float:
        x, edge_index, y, mask = data()
        x, edge_index = model.shard(x, edge_index)
        y, mask = model.shard(y, mask)
        return train(model, x, edge_index, y, mask)

    torch.manual_seed(0)
    net = Net()
    expected = train(copy.deepcopy(net), *data())
    assert on_ranks(run, net) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: torch.compile(nn.Linear(2, 2)), "the result of torch.compile.*not compiled"),
    (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), r"the result of torch.compile \(0\)"),
    (lambda: torch.jit.script(nn.Linear(2, 2)), "torch.jit.script"),
    (lambda: nn.DataParallel(nn.Linear(2, 2)), r"wrapped in DataParallel.*wrapped\.module"),
    (lambda: nn.LazyLinear(3), "weight, bias has no shape yet.*call the model once"),
    (lambda: torch.relu, r"not a torch\.nn\.Module"),
])  # fmt: skip
def test_models_that_are_no_plain_modules_are_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        sylvie_fx.distribute(make())


def test_what_a_deleted_model_held_is_freed_at_once() -> None:
    """Not at Python's next collection of cycles, before which several models' buffers may pile up."""
    x, edge_index, y, _ = data()

    def rank(net: DistributedModule) -> Any:
        own, edges, labels = net.shard(x, edge_index, y)
        F.cross_entropy(net(own, edges), labels).backward()
        gc.collect()  # what the capture left
        machines = [o for o in gc.get_objects() if isinstance(o, Machine) and o.transport is net.transport]
        return [weakref.ref(machine) for machine in machines]

    enabled = gc.isenabled()
    gc.disable()
    try:
        for references in on_ranks(rank, Net(), bits=1):
            assert references
            assert all(reference() is None for reference in references)
    finally:
        if enabled:
            gc.enable()
