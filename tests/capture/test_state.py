"""What forward assigns to attributes: as on one device, or refused with the line."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import CaptureError
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks


class Stateful(nn.Module):
    """One layer, and a function of its result that may assign to the model."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(4, 3), function
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.calls, self.started, self.aux, self.kept = 0, False, None, None
        self.past: list[Tensor] = []
        self.tau = torch.ones(())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(x).tanh()
        return self.function(self, h.index_add(0, edge_index[1], h[edge_index[0]]), edge_index)


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(30, 4, generator=g), torch.randint(0, 30, (2, 90), generator=g)


def running_mean(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h - m.mean


def exchanged(m: Any, h: Tensor, e: Tensor) -> Tensor:
    before = m.mean
    m.mean, m.other = m.other, m.mean + 1
    return h * m.mean + before


def counted(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.calls += 1
    return h * min(1.0, m.calls / 3)


def started(m: Any, h: Tensor, e: Tensor) -> Tensor:
    first, m.started = not m.started, True
    return h * 2 if first else h


def auxiliary(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.aux = h.pow(2).mean()
    return h


def for_another_method(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.kept, m.edges, m.rows = h, e, h.size(0)
    return m.kept / m.rows


def cached(m: Any, h: Tensor, e: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.zeros_like(h[:, 0]).index_add(0, e[1], torch.ones_like(e[1], dtype=h.dtype))
    return h * m.kept[:, None]


def state(model: Any) -> list[Any]:
    aux = None if model.aux is None else float(model.aux.detach())
    return [model.mean.clone(), model.other.clone(), model.calls, model.started, aux]


@pytest.mark.parametrize("function", [running_mean, exchanged, counted, started, auxiliary, for_another_method, cached])
def test_state_is_as_on_one_device(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    plain, cache = Stateful(function), ProgramCache()
    models = [copy.deepcopy(plain) for _ in range(2)]

    def rank(transport: Any) -> list[Any]:
        model = DistributedModule(models[transport.rank], Options(timeout=20), default_passes(), transport, cache)
        x, edge_index = model.shard(*data(), partition="random")
        found = []
        for _ in range(3):
            out = model(x, edge_index)
            (out.sum() + (model.aux if function is auxiliary else 0)).backward()
            found.append([out.full(), *state(model)])
        return [*found, [p.grad for p in model.parameters()]]

    expected: list[Any] = []
    for found in run_ranks(2, rank, 20):
        if not expected:
            for _ in range(3):
                out = plain(*data())
                (out.sum() + (plain.aux if function is auxiliary else 0)).backward()
                expected.append([out.detach(), *state(plain)])
            expected.append([p.grad for p in plain.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def recurrent(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.kept = (h if m.kept is None else h + m.kept).detach()
    return h * m.kept


def collected(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.past.append(h.mean())
    return h


def written(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.tau.mul_(2)
    return h * m.tau


def resized(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.mean = h.detach()
    return h


def replaced(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.lin.weight = nn.Parameter(m.lin.weight * 0.5)
    return h


def learned(m: Any, h: Tensor, e: Tensor) -> Tensor:
    m.mean = m.mean + h.mean(0)
    return h - m.mean


def drawn(m: Any, h: Tensor, e: Tensor) -> Tensor:
    return h * random.random()


def drawn_by_numpy(m: Any, h: Tensor, e: Tensor) -> Tensor:
    return h if np.random.rand() < 0.5 else h * 2


def drawn_by_its_own(m: Any, h: Tensor, e: Tensor) -> Tensor:
    return h * m.generator.random()


@pytest.mark.parametrize(("function", "message"), [
    (drawn, r"test_state.py:\d+: forward draws random numbers from random.*pass them as an argument"),
    (drawn_by_numpy, "forward draws random numbers from numpy.random"),
    (drawn_by_its_own, r"test_state.py:\d+: forward keeps self.generator from one call for the next"),
])  # fmt: skip
def test_random_numbers_of_python_are_refused(function: Callable[..., Tensor], message: str) -> None:
    for generator in (random.Random(0), np.random.default_rng(0)):
        module = Stateful(function)
        module.generator = generator
        model = sylvie_fx.distribute(module)
        with pytest.raises(CaptureError, match=message):
            model(*model.shard(*data()))


@pytest.mark.parametrize(("function", "message"), [
    (recurrent, r"forward keeps self.kept from one call for the next.*self.kept.copy_"),
    (collected, r"forward keeps self.past from one call for the next"),
    (written, r"forward keeps self.tau from one call for the next"),
    (resized, r"replaces the buffer mean by one of another shape.*self.mean.copy_"),
    (replaced, r"replaces the parameter weight in module 'lin'"),
    (learned, r"a value with a gradient to a buffer.*value.detach"),
])  # fmt: skip
def test_state_of_another_kind_is_refused_and_left_as_it_was(function: Callable[..., Tensor], message: str) -> None:
    model = sylvie_fx.distribute(Stateful(function))
    before = {name: copy.copy(value) for name, value in vars(model.module).items() if name[0] != "_"}
    weight = model.lin.weight.clone()
    x, edge_index = model.shard(*data())
    with pytest.raises(CaptureError, match=rf"test_state.py:\d+: .*{message}"):
        model(x, edge_index)
    assert {name: value for name, value in vars(model.module).items() if name[0] != "_"} == before
    assert torch.equal(model.lin.weight, weight)
    assert model.mean.count_nonzero() == 0


def test_a_buffer_may_take_a_gradient_where_none_is_recorded() -> None:
    plain = Stateful(learned)
    model = sylvie_fx.distribute(copy.deepcopy(plain))
    x, edge_index = model.shard(*data())
    with torch.no_grad():
        torch.testing.assert_close(model(x, edge_index).full(), plain(*data()))
        torch.testing.assert_close(model.mean, plain.mean)


# --- what a program has taken from attributes, changed between calls --------------------------------------------------


class Settings(nn.Module):
    """Reads attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.last = nn.Linear(4, 3), nn.ReLU()
        self.act, self.config, self.tau = torch.tanh, {"scale": [1.0]}, torch.tensor(1.0)
        self.settings, self.level = SimpleNamespace(shift=0.0), 1.0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.act(self.lin(x)) * self.config["scale"][0] / self.tau + self.settings.shift
        return self.last(h.index_add(0, edge_index[1], h[edge_index[0]])) * self.level


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a dict": lambda m: m.config.update(scale=[3.0]),
    "a list in a dict": lambda m: m.config["scale"].__setitem__(0, 2.0),
    "a tensor": lambda m: setattr(m, "tau", torch.tensor(4.0)),
    "a tensor written in place": lambda m: m.tau.fill_(3.0),
    "a function": lambda m: setattr(m, "act", torch.sigmoid),
    "a namespace": lambda m: setattr(m.settings, "shift", 1.0),
    "a module": lambda m: setattr(m, "last", nn.Sigmoid()),
    "int for float": lambda m: setattr(m, "level", 1),
}


def test_attributes_that_change_between_calls_are_seen() -> None:
    cache = ProgramCache()
    models = [Settings() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def rank(transport: Any) -> list[Tensor]:
        plain = models[transport.rank]
        model = DistributedModule(plain, Options(timeout=20), default_passes(), transport, cache)
        x, edge_index = model.shard(*data(), partition="random")
        outs = [model(x, edge_index).full()]
        for change in CHANGES.values():
            change(plain)
            outs += [model(x, edge_index).full(), model(x, edge_index).full()]
            torch.testing.assert_close(outs[-2:], [plain(*data()).detach()] * 2)
        return outs

    first, second = run_ranks(2, rank, 60)
    torch.testing.assert_close(first, second)
    assert len(cache.programs) == len(CHANGES) + 1


def test_a_copy_sees_its_own_changes() -> None:
    model = sylvie_fx.distribute(Settings())
    x, edge_index = model.shard(*data())
    model(x, edge_index)
    model.config["scale"] = [5.0]
    copied = copy.deepcopy(model)
    for one, scale in ((copied, None), (model, 2.0), (copied, 3.0)):
        if scale is not None:
            one.config["scale"] = [scale]
        torch.testing.assert_close(one(x, edge_index).full(), one.module(*data()).detach())


@pytest.mark.parametrize("hidden", [lambda: [nn.Linear(3, 3)], lambda: {"a": nn.Parameter(torch.ones(3))}])
def test_parameters_that_are_not_registered_are_refused(hidden: Callable[[], Any]) -> None:
    def read(m: Any, h: Tensor, e: Tensor) -> Tensor:
        return m.past[0](h) if isinstance(m.past, list) else h * m.past["a"]

    module = Stateful(read)
    module.past = hidden()
    model = sylvie_fx.distribute(module)
    message = r"test_state.py:\d+: self.past holds parameters that are not registered.*nn.ModuleList"
    with pytest.raises(CaptureError, match=message):
        model(*model.shard(*data()))


def test_an_attribute_with_many_values_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    module = Settings()
    model = sylvie_fx.distribute(module)
    x, edge_index = model.shard(*data())
    for step in range(8):
        module.level = 0.9**step
        torch.testing.assert_close(model(x, edge_index).full(), module(*data()).detach())
    (warning,) = (r.getMessage() for r in caplog.records if r.name == "sylvie_fx.baked")
    assert re.match(r"the model has been captured for 6 values of its attribute level.*as a tensor", warning)
