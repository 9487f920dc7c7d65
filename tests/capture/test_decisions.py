from __future__ import annotations

import logging

import pytest
import torch
from pass_support import Layer
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.capture.decisions import Replaying, record
from sylvie_fx.ir.errors import CaptureError


def data(edges: int = 200) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 12, generator=generator, dtype=torch.float64), torch.randint(
        40, (2, edges), generator=generator
    )


def verified(function, *more: Tensor) -> sylvie_fx.VerifyReport:
    return sylvie_fx.verify(
        Layer(function) if not isinstance(function, nn.Module) else function, *data(), *more, parts=2
    )


def test_answers_are_recorded_in_order() -> None:
    x = torch.tensor([1.0, 0.0, 3.0])

    def run() -> None:
        if (x == 0).any():
            int(x.max())
        x.nonzero()
        [float(v) for v in x.tolist()]
        list(x.unique())

    decisions = record(nn.Linear(1, 1), run)
    assert [(d.function, d.answer) for d in decisions] == [
        ("__bool__", True), ("__int__", 3), ("nonzero", [(2, 1)]), ("unbind", 3), ("item", 1.0), ("item", 0.0), ("item", 3.0),
        ("unique", [(3,)]), ("unbind", 3),
    ]  # fmt: skip


def test_another_way_is_an_error() -> None:
    with Replaying([]), pytest.raises(CaptureError, match="takes another way"):
        bool(torch.ones(()))


def test_the_model_is_left_as_it_was() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.cache = x
            return self.norm(x)

    model, state = Stateful(), torch.get_rng_state()
    record(model, lambda: model(torch.rand(5, 3)))
    assert model.calls == 0
    assert not hasattr(model, "cache")
    assert model.norm.num_batches_tracked == 0
    assert not model.norm.running_mean.any()
    assert torch.equal(state, torch.get_rng_state())


def test_a_decision_that_fails_on_the_graph_captures_again(caplog: pytest.LogCaptureFixture) -> None:
    def by_degree(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        degree = torch.bincount(e[1], minlength=x.size(0))
        out = torch.zeros(x.size(0), 4, dtype=x.dtype)
        for d in degree.unique().tolist():
            nodes = (degree == d).nonzero().view(-1)
            if nodes.numel() > 1:
                out = out.index_add(0, nodes, m.a(x[nodes]) * d)
        return out

    with caplog.at_level(logging.INFO, "sylvie_fx.engine"):
        report = verified(by_degree)
    assert report.exact, report
    assert "captured again, on the whole graph" in caplog.text


def test_sizes_that_were_taken_for_numbers_are_checked() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(12, 4, dtype=torch.float64)

        def forward(self, x: Tensor, e: Tensor, kind: Tensor) -> Tensor:
            h = self.lin(x)
            for value in kind.unique():  # as many iterations as there are kinds
                h = h + h * (kind == value).unsqueeze(1)
            return h

    model = Rows()
    for kinds in (2, 5, 3):
        report = sylvie_fx.verify(model, *data(), torch.arange(40) % kinds, parts=2)
        assert report.exact, report


def test_one_distributed_model_on_two_graphs() -> None:
    def loops(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = m.a(x)
        for _ in range(int(torch.bincount(e[1]).max())):
            h = h * 0.9
        return h

    model = Layer(loops)
    net = sylvie_fx.distribute(model)
    for edges in (200, 400, 200):
        given = data(edges)
        assert torch.allclose(net(*net.shard(*given)).local(), model(*given))


def test_numbers_from_features_are_refused() -> None:
    report = verified(lambda m, x, e: m.a(x) * float(x.mean()) if x.size(0) else x)
    assert "depends on values computed from features" in report.refused
    assert "test_decisions.py:" in report.refused


def test_what_the_model_itself_raises_is_raised() -> None:
    def strict(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        if not (e[1][1:] >= e[1][:-1]).all():
            raise ValueError("edges must be sorted")
        return m.a(x)

    with pytest.raises(ValueError, match="must be sorted"):
        verified(strict)


def test_own_assertions_on_the_graph_are_checked_on_the_real_graph() -> None:
    def checked(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        torch._assert_async((torch.bincount(e[1], minlength=x.size(0)) < 1000).all(), "a hub of 1000 edges")
        return torch.zeros(x.size(0), 4, dtype=x.dtype).index_add(0, e[1], m.a(x)[e[0]])

    report = verified(checked)
    assert report.exact, report
    net, (x, e) = sylvie_fx.distribute(Layer(checked)), data(1000)
    net(*net.shard(x, e))
    with pytest.raises(RuntimeError, match="a hub of 1000 edges"):
        net(*net.shard(x, torch.stack([e[0], torch.zeros_like(e[1])])))


def test_own_assertions_on_features_are_checked_in_every_step() -> None:
    def checked(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        torch._assert_async((x < 1000).all(), "features out of range")
        return torch.zeros(x.size(0), 4, dtype=x.dtype).index_add(0, e[1], m.a(x)[e[0]])

    report = verified(checked)
    assert report.exact, report
    net, (x, e) = sylvie_fx.distribute(Layer(checked)), data()
    x, e = net.shard(x, e)
    net(x, e)
    with pytest.raises(RuntimeError, match="features out of range"):
        net(x * 1e6, e)
