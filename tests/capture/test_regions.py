"""``torch.no_grad()`` inside forward, writes to memory behind autograd's back, and gradients that a model defines itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from pass_support import Layer
from torch import Tensor, nn

import sylvie_fx


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 12, generator=generator, dtype=torch.float64), torch.randint(
        40, (2, 200), generator=generator
    )


def spread(x: Tensor, e: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, e[1], x[e[0]])


def statistics(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        mean, scale, near = h.mean(0), m.a.weight.norm(), spread(h, e)
        near.mul_(0.5)
    return h - mean * scale + near


def gradients_inside(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    with torch.no_grad():
        fixed = m.a(x)
        with torch.enable_grad():
            learned = m.a(x) * 2
        total = fixed + learned
    return total * learned


def clamped_without_gradient(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h.clamp_(-1, 1)
    return m.b(h)


def written_through_detach(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    twice = h * 2
    h.detach()[:, 0].mul_(3.0)
    return m.b(h) + m.b(twice)


def written_through_data(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    h.data.clamp_(-1, 1)
    return m.b(h)


def checkpointed(m: Layer, x: Tensor, e: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda h: m.b(spread(h, e)).relu(), m.a(x), use_reentrant=True)


@pytest.mark.parametrize("function", [
    statistics, gradients_inside, clamped_without_gradient, written_through_detach, written_through_data, checkpointed,
])  # fmt: skip
def test_regions_without_gradient_are_exact(function: Callable[..., Any]) -> None:
    report = sylvie_fx.verify(Layer(function), *data(), parts=2, partition="random")
    assert report.exact, report


def test_a_running_mean_by_hand() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(12, 4)
            self.register_buffer("mean", torch.zeros(4))
            self.mean: Tensor

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            h = self.lin(x)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * h.mean(0))
            return spread(h - self.mean, e)

    report = sylvie_fx.verify(Running().double(), *data(), parts=2, partition="random", steps=2)
    assert report.exact, report


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm(norm: Callable[..., Any]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = norm(nn.Linear(12, 4))

        def forward(self, x: Tensor, e: Tensor) -> Tensor:
            return spread(self.lin(x), e)

    report = sylvie_fx.verify(Normed().double(), *data(), parts=2, partition="random")
    assert report.exact, report


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


def hooked(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    return h


def in_half_precision(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = m.a(x)
    return h.double()


@pytest.mark.parametrize(("function", "message"), [
    (lambda m, x, e: _Reversed.apply(m.a(x)), "_Reversed, an autograd function"),
    (hooked, "register_hook"),
    (in_half_precision, "autocast"),
])  # fmt: skip
def test_gradients_of_its_own_are_refused(function: Callable[..., Any], message: str) -> None:
    report = sylvie_fx.verify(Layer(function), *data(), parts=2)
    assert report.refused is not None
    assert message in report.refused
    assert "test_regions.py:" in report.refused


def test_hooks_of_modules() -> None:
    model = Layer(lambda m, x, e: spread(m.a(x), e))
    model.a.register_full_backward_hook(lambda module, into, out: None)
    refused = sylvie_fx.verify(model, *data(), parts=2).refused
    assert refused is not None
    assert "backward hook in module 'a'" in refused


def test_hooks_of_parameters_see_the_whole_gradient() -> None:
    model = Layer(lambda m, x, e: spread(m.a(x), e))
    model.a.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    report = sylvie_fx.verify(model, *data(), parts=3, partition="random")
    assert report.exact, report
