"""Writes into sharded tensors outside the model are seen by everything that reads them, or refused at the next use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

NODES, EDGES = 17, 40
CACHE = ProgramCache()


class Model(nn.Module):
    """One aggregation of features alone, which is kept, and one with edge weights, which are part of the structure."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        src, dst = edge_index
        h = self.lin(torch.zeros_like(x).index_add(0, dst, x[src]))
        return h + torch.zeros_like(h).index_add(0, dst, h[src] * weight[:, None])


class Case:
    """What a line of a script has at hand."""

    def __init__(self, model: Any, x: Any, edge_index: Any, w: Any, y: Any, mask: Any) -> None:
        self.model, self.x, self.edge_index, self.w, self.y, self.mask = model, x, edge_index, w, y, mask

    def numbers(self) -> list[float]:
        """What depends on every tensor, before and after a write."""
        out = self.model(self.x, self.edge_index, self.w)
        loss = F.cross_entropy(out[self.mask], self.y[self.mask])
        share = F.one_hot(self.y, 3).double().mean(0)
        return [float(out.detach().norm()), float(loss.detach()), float(len(self.x[self.mask])), *share.tolist()]


def data() -> list[Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(NODES) < 0.5
    mask[0] = True
    edges, labels = torch.randint(0, NODES, (2, EDGES)), torch.randint(0, 3, (NODES,))
    return [torch.randn(NODES, 5).double(), edges, torch.rand(EDGES).double(), labels, mask]


def on_one_device(script: Callable[[Case], Any]) -> Any:
    given = data()
    torch.manual_seed(1)
    return script(Case(Model(), *given))


def on_ranks(script: Callable[[Case], Any], parts: int = 3) -> list[Any]:
    given = data()
    torch.manual_seed(1)
    model = Model()

    def rank(transport: Any) -> Any:
        distributed = DistributedModule(copy.deepcopy(model), Options(timeout=60), default_passes(), transport, CACHE)
        return script(Case(distributed, *distributed.shard(*given, partition="random")))

    return run_ranks(parts, rank, 60)


def masks_in_place(c: Case) -> None:
    c.mask &= c.y > 0
    c.mask |= c.x[:, 0] > 1
    c.mask ^= c.y == 2
    c.y &= 1


def assign(c: Case) -> None:
    c.w.data = c.w * 2
    c.x.data = c.x.data * 3


def pseudo_labels(c: Case) -> None:
    c.y = c.y.clone()
    c.y[c.mask] = 0
    c.y[c.y == 2] += -1


def other_edges(c: Case) -> None:
    c.edge_index = c.edge_index.clone()
    c.edge_index[1] = c.edge_index[0]
    c.edge_index[0, :] *= 0


def augmented(c: Case) -> None:
    c.x[:, 0] += 1
    c.x[:, 1:] -= 1
    c.w[c.mask[c.edge_index[0]]] *= 0.5
    c.y[c.mask] *= 0


def result_in_place(c: Case) -> None:
    first = c.y + 0
    first[c.mask] = 0
    c.y = c.y + 0


def view_of_a_copy(c: Case) -> None:
    labels = c.y.view(-1, 1).clone()
    labels.view(-1).zero_()
    c.y = c.y * (c.y.view(-1) > 0)


WRITES: dict[str, Callable[[Case], Any]] = {
    "x.data": lambda c: c.x.data.mul_(0.5),
    "x.detach": lambda c: c.x.detach().mul_(0.5),
    "a column of x": lambda c: c.x[:, 1].zero_(),
    "x.local": lambda c: c.x.local().mul_(0.5) if hasattr(c.x, "local") else c.x.mul_(0.5),
    "x by mask": lambda c: c.x.__setitem__(c.mask, 0.0),
    "w.data": lambda c: c.w.data.mul_(2),
    "w.detach": lambda c: c.w.detach().mul_(2),
    "w.data of data": lambda c: c.w.data.detach().data.mul_(2),
    "w": lambda c: c.w.mul_(2),
    "masks in place": masks_in_place,
    "w.data = ...": assign,
    "mask.data": lambda c: c.mask.data.__setitem__(slice(None), True),
    "mask": lambda c: c.mask.logical_not_(),
    "y.data": lambda c: c.y.data.zero_(),
    "y by mask": lambda c: c.y.__setitem__(c.mask, 0),
    "a clone of y": pseudo_labels,
    "a clone of the edges": other_edges,
    "augmented": augmented,
    "a result": result_in_place,
    "a view of a copy": view_of_a_copy,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen(name: str) -> None:
    def script(c: Case) -> list[float]:
        before = c.numbers()
        with torch.no_grad():
            WRITES[name](c)
        return [*before, *c.numbers()]

    expected = on_one_device(script)
    for found in on_ranks(script):
        assert found == pytest.approx(expected, rel=1e-10)


def other_columns(edges: Any) -> Any:
    source = edges[0]
    source.mul_(0)
    edges[1] = source
    return edges.sum()


UNSEEN: dict[str, tuple[Callable[[Case], Any], str]] = {
    "a view of w": (
        lambda c: c.w.view(-1, 1).mul_(2),
        r"through a view of the same memory \(mul_ at .*test_writes.py:\d+\)",
    ),
    "the same type": (
        lambda c: c.y.long().zero_(),
        r"through a view of the same memory \(zero_ at .*test_writes.py:\d+\)",
    ),
    "a slice of x": (
        lambda c: c.x[2:9].zero_(),
        r"through a view of the same memory \(zero_ at .*test_writes.py:\d+\)",
    ),
    "reshaped": (lambda c: c.w.reshape(-1, 1).zero_(), r"through a view of the same memory \(zero_ at"),
    "contiguous": (lambda c: c.edge_index.contiguous()[1].zero_(), r"through a view of the same memory \(zero_ at"),
    "a row of the edges": (lambda c: c.edge_index[0].zero_(), r"through a view of the same memory \(zero_ at"),
    "other columns": (lambda c: other_columns(c.edge_index.clone()), r"through a view of the same memory \(mul_ at"),
    "w.local": (lambda c: c.w.local().mul_(2), r"through \.local\(\)"),
    "a view of local": (lambda c: c.y.local().view(-1, 1).zero_(), r"through \.local\(\)"),
    "mask.local": (lambda c: c.mask.local().zero_(), r"through \.local\(\)"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_write_that_can_not_be_seen_is_refused_at_the_next_use(name: str) -> None:
    write, why = UNSEEN[name]

    def script(c: Case) -> Any:
        c.numbers()
        write(c)
        return c.numbers()

    with pytest.raises(SylvieError, match=rf"after a write that did not reach it, {why}.*y = y\.clone\(\)") as raised:
        on_ranks(script, 2)
    assert "test_writes.py:" in str(raised.value)


COPIES: dict[str, Callable[[Case], Any]] = {
    "columns": lambda c: c.edge_index.t().contiguous(),
    "flat columns": lambda c: c.edge_index.t().reshape(-1),
    "a column of two": lambda c: torch.stack([c.y, c.y], 1)[:, 0].contiguous(),
    "a column of features": lambda c: c.x[:, 1].contiguous(),
    "turned features": lambda c: c.x.t().contiguous(),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_copies_for_its_strides_may_be_written_into(name: str) -> None:
    def script(c: Case) -> list[float]:
        copied = COPIES[name](c)
        copied.mul_(0)
        return [*c.numbers(), float(copied.sum())]

    expected = on_one_device(script)
    for found in on_ranks(script, 2):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_view_is_refused_after_a_write_into_what_it_views() -> None:
    def script(c: Case) -> Any:
        view = c.w.view(-1, 1)
        c.w.mul_(2)
        return view.sum()

    with pytest.raises(SylvieError, match="through a view of the same memory"):
        on_ranks(script, 2)


def test_a_write_into_the_tensor_that_was_sharded_is_refused() -> None:
    x, edges, w, y, mask = data()
    model = DistributedModule(Model(), Options(timeout=60), default_passes(), run_ranks(1, lambda t: t, 60)[0], CACHE)
    sharded = model.shard(x, edges, w, y, mask)
    w.mul_(2)
    with pytest.raises(SylvieError, match=r"in the tensor that model\.shard\(\) was given"):
        model(*sharded[:3])


@pytest.mark.parametrize("write", [
    lambda c: c.edge_index.copy_(c.edge_index.flip(0)), lambda c: c.edge_index.data.zero_(),
])  # fmt: skip
def test_the_graph_itself_is_not_written_into(write: Callable[[Case], Any]) -> None:
    with pytest.raises(SylvieError, match=r"would change the graph.*before model\.shard"):
        on_ranks(write, 2)


@pytest.mark.parametrize("assigned", [lambda c: c.y.local() * 0, lambda c: c.w, lambda c: torch.zeros(NODES)])
def test_other_rows_as_data_are_refused(assigned: Callable[[Case], Any]) -> None:
    def script(c: Case) -> None:
        c.y.data = assigned(c)

    with pytest.raises(SylvieError, match=r"test_writes.py:\d+.*rows of the same nodes or edges"):
        on_ranks(script, 2)


def in_inference_mode(c: Case) -> list[float]:
    """Torch does not count writes into tensors that are made in inference mode; in the others it does."""
    with torch.inference_mode():
        c.mask |= c.x[:, 0] > 1
        made = Case(c.model, c.x.clone(), c.edge_index, c.w.clone(), c.y.clone(), c.mask.clone())
        found = [*c.numbers(), *made.numbers()]
        for tensor in (made.x, made.w, made.y):
            tensor.mul_(2)
            tensor.detach().mul_(2)
        made.y %= 3
        made.mask[made.y > 0] = False
        found += [*c.numbers(), *made.numbers()]
    return found + c.numbers()


def test_writes_in_inference_mode_are_seen() -> None:
    expected = on_one_device(in_inference_mode)
    for found in on_ranks(in_inference_mode):
        assert found == pytest.approx(expected, rel=1e-10)


def test_an_unseen_write_in_inference_mode_is_refused() -> None:
    def script(c: Case) -> Any:
        with torch.inference_mode():
            made = c.y.clone()
            made.local().mul_(2)
            return made.sum()

    with pytest.raises(SylvieError, match=r"after a write that did not reach it, through \.local\(\)"):
        on_ranks(script, 2)


def test_an_attribute_that_was_made_in_inference_mode_may_be_written_into() -> None:
    class Scaled(Model):
        def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
            return super().forward(x, edge_index, weight) * self.scale

    def totals(model: Any, case: Case) -> list[float]:
        with torch.inference_mode():
            before = model(case.x, case.edge_index, case.w).norm()
            scaled.scale.mul_(3)
            return [float(before), float(model(case.x, case.edge_index, case.w).norm())]

    scaled = Scaled()
    found = []
    for distributed in (False, True):
        with torch.inference_mode():
            scaled.scale = torch.ones(3, dtype=torch.float64)
        model = sylvie_fx.distribute(scaled) if distributed else scaled
        found.append(totals(model, Case(model, *(model.shard(*data()) if distributed else data()))))
    assert found[1] == pytest.approx(found[0], rel=1e-10)
