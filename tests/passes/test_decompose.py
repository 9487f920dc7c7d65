from __future__ import annotations

import pytest
import torch
from pass_support import Layer, after, changes, check_parity, targets
from torch import Tensor

from sylvie_fx.passes.decompose import Decompose


def outer(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return torch.outer(m.a(x).sum(1), m.table[0])


def several_results(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    left, right = torch.hsplit(m.a(x), 2)
    return left * right


def pure(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return torch.einsum("nd,kd->nk", m.a(x), m.table)


def test_a_composite_without_a_rule_becomes_its_definition(golden) -> None:
    golden(after(outer, "decompose"))


def test_a_composite_with_a_rule_stays() -> None:
    program = after(pure, "decompose", before=True)
    assert not changes(Decompose(), program)
    assert "aten.einsum" in targets(program)


def test_a_second_run_changes_nothing() -> None:
    assert not changes(Decompose(), after(outer, "decompose"))


@pytest.mark.parametrize("function", [outer, several_results, pure])
def test_parity(function) -> None:
    check_parity(function)
