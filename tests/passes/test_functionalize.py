from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pass_support import Layer, after, changes, check_parity, targets
from torch import Tensor

from sylvie_fx.ir.errors import PassError
from sylvie_fx.passes.functionalize import Functionalize


def scatter_in_place(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    out = x.new_zeros(x.size(0), 4)
    out.scatter_add_(0, e[1].view(-1, 1).expand(-1, 4), m.a(x)[e[0]])
    return out


def columns_in_place(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x) * 1.0
    first = h[:, 0]
    h[:, 1:3] *= 2.0
    first.add_(h[:, 3])
    return m.b(h.relu_())


def dropout_in_place(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = F.dropout(m.a(x), 0.5, inplace=True)
    torch.nn.Dropout(0.25, inplace=True)(h[:, 1:])
    return m.b(torch.zeros_like(h).index_add(0, e[1], h[e[0]]))


def pure(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x).relu())


def test_an_in_place_scatter_becomes_a_functional_one(golden) -> None:
    golden(after(scatter_in_place, "functionalize"))


def test_a_write_into_a_view_is_seen_by_its_base_and_other_views(golden) -> None:
    golden(after(columns_in_place, "functionalize"))


def test_a_pure_program_stays() -> None:
    assert not changes(Functionalize(), after(pure, "functionalize", before=True))


def test_a_second_run_changes_nothing() -> None:
    assert not changes(Functionalize(), after(columns_in_place, "functionalize"))


def test_buffers_are_still_updated_in_place() -> None:
    norm = torch.nn.BatchNorm1d(4, dtype=torch.float64)

    def counted(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        m.norm = norm
        return m.norm(m.a(x))

    assert "aten.add_.Tensor" in targets(after(counted, "functionalize"))


def test_an_input_in_place_is_refused() -> None:
    def changed(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        x.mul_(2.0)
        return m.a(x)

    with pytest.raises(PassError, match=r"test_functionalize.py:\d+.*an input, is changed in place.*clone"):
        after(changed, "functionalize")


@pytest.mark.parametrize("draw", [
    lambda h: torch.empty_like(h).bernoulli_(0.5), lambda h: h.new_empty(h.shape).uniform_(),
    lambda h: torch.zeros_like(h).geometric_(0.5),
])  # fmt: skip
def test_numbers_drawn_in_place_are_refused(draw) -> None:
    def drawn(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        h = m.a(x)
        return h * draw(h)

    with pytest.raises(PassError, match=r"test_functionalize.py:\d+.*_ draws random numbers.*draw outside the model"):
        after(drawn, "functionalize")


@pytest.mark.parametrize("function", [scatter_in_place, columns_in_place, dropout_in_place, pure])
def test_parity(function) -> None:
    check_parity(function)
