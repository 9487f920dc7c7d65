"""Links of two kinds: rows travel to ranks of the same host in one way, and between hosts in another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import OptionError
from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks

FEATURES = 1024
FAST = 100.0  # Gbit/s: the hidden rows cross, and are not computed twice
HOSTS = ("a", "a", "b")


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 4, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x).relu()
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


def on_hosts(weights: list[float], threaded: bool, **options: Any) -> list[tuple[Tensor, Tensor, str]]:
    """What node ``i`` on rank ``i`` sums over edges from both other nodes, step by step; its last gradient; a program and
    its table."""
    cache, model = ProgramCache(), Sum()
    edges = torch.tensor([[1, 2, 0, 2, 0, 1], [0, 0, 1, 1, 2, 2]])

    def rank(transport: InProcessTransport) -> tuple[Tensor, Tensor, str]:
        transport.host, transport.threaded = HOSTS[transport.rank], threaded
        net = sylvie_fx.DistributedModule(
            copy.deepcopy(model), sylvie_fx.Options(warm_up=1, stale="last", link=FAST, **options),
            sylvie_fx.default_passes(), transport, cache,
        )  # fmt: skip
        # Each node's rows are a number of its own: 1, 10 and 100 times the weight.
        rows = torch.tensor([[1.0], [10.0], [100.0]], dtype=torch.float64).expand(3, FEATURES).contiguous()
        x, e = net.shard(rows, edges, partition=torch.tensor([0, 1, 2]))
        found = []
        for weight in weights:
            with torch.no_grad():
                net.module.linear.weight.fill_(weight / FEATURES)
            net.zero_grad()
            out = net(x, e)
            (out * weight).sum().backward()
            found.append(out.detach().as_subclass(Tensor)[0, 0])
        return (
            torch.stack(found),
            net.module.linear.weight.grad[0, 0].clone(),
            str(net.program("train")) + net.explain("train"),
        )

    return run_ranks(3, rank, 30.0)


@pytest.mark.parametrize("threaded", [False, True])
def test_ages_depend_on_the_host(threaded: bool) -> None:
    policy = {"intra_host": {"staleness": 0}, "inter_host": {"staleness": 1}}
    (first, g, text), (second, *_), (third, *_) = on_hosts([1.0, 2.0, 3.0], threaded, policy=policy)
    assert first.tolist() == pytest.approx([110.0, 10 * 2 + 100 * 1, 10 * 3 + 100 * 2])
    assert second.tolist() == pytest.approx([101.0, 1 * 2 + 100 * 1, 1 * 3 + 100 * 2])
    assert third.tolist() == pytest.approx([11.0, 11 * 1, 11 * 2])
    # Each row is read by two nodes; the gradient of a reader on the other host is of the step before.
    assert float(g) == pytest.approx((1 + 10) * (3 + 2) + 100 * (2 + 2))
    assert "site 0: exact, staleness 0" in text


def test_bits_depend_on_the_host() -> None:
    policy = {"intra_host": {"bits": 32}, "inter_host": {"bits": 1}}
    for found, _, text in on_hosts([1.0, 2.0], False, policy=policy):
        assert torch.isfinite(found).all()
        assert "to ranks of the same host:" in text
        assert "site 0: exact, staleness 0" in text
        assert "bit dithered shift" in text
        assert "within a host exact" in text
    # A row of four float64 and a gradient to each of two ranks: 64 bytes within the host; 8 each between hosts.
    texts = [text for *_, text in on_hosts([1.0, 2.0], False, policy=policy)]
    assert ["about 80 bytes a step" in text for text in texts] == [True, True, False]
    assert "about 32 bytes a step" in texts[2]


def test_one_host_has_no_other_kind() -> None:
    policy = {"intra_host": {"staleness": 0}, "inter_host": {"staleness": 5}}
    global HOSTS
    before, HOSTS = HOSTS, ("a", "a", "a")
    try:
        assert on_hosts([1.0, 2.0, 3.0], False, policy=policy)[0][0].tolist() == pytest.approx([110.0, 220.0, 330.0])
    finally:
        HOSTS = before


@pytest.mark.parametrize(
    "policy",
    [{"same_host": {}}, {"intra_host": {"seed": 1}}, {"intra_host": 1}, {"inter_host": {"bits": 3}}, {"inter_host": {"bits": "auto"}}],
)  # fmt: skip
def test_policies_that_mean_nothing(policy: Any) -> None:
    with pytest.raises(OptionError):
        sylvie_fx.Options(policy=policy)


def test_ranks_of_one_host_alone_may_be_late() -> None:
    policy = {"intra_host": {"staleness": 1}, "inter_host": {"staleness": 0}}
    (first, *_), _, (third, *_) = on_hosts([1.0, 2.0, 3.0], False, policy=policy)
    assert first.tolist() == pytest.approx([110.0, 10 * 1 + 100 * 2, 10 * 2 + 100 * 3])
    assert third.tolist() == pytest.approx([11.0, 22.0, 33.0])


def test_adaptive_bits_have_no_kinds_of_links() -> None:
    with pytest.raises(OptionError, match='a policy together with bits="auto"'):
        sylvie_fx.Options(bits="auto", policy={"intra_host": {"staleness": 0}})


@pytest.mark.parametrize("options", [{"staleness": 1}, {"policy": {"inter_host": {"bits": 1}}}])
def test_a_pipeline_that_can_not_be_late_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="a pipeline without split-exchanges"):
        sylvie_fx.distribute(Sum(), passes=sylvie_fx.default_passes().without("split-exchanges"), **options)
