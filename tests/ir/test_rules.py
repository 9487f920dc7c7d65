from __future__ import annotations

import pytest
import torch
from pass_support import Layer, after
from torch import Tensor

import sylvie_fx
from sylvie_fx.ir.placement import REPLICATED, Placement, Rows
from sylvie_fx.ir.program import meta
from sylvie_fx.ir.rules import Refused, find_rule, placement_rule, pointwise, same_rows, wrap
from sylvie_fx.ir.rules_math import einsum_letters

N0 = Rows("N", 0, 1, 0)


def placed(function) -> Placement:
    """Where the one result of a function lives."""
    program = after(function, "infer-placement")
    output = next(n for n in program.graph.nodes if n.op == "output")
    found = meta(output.args[0][0]).placement
    assert not isinstance(found, tuple)
    return found


@pytest.mark.parametrize(("function", "expected"), [
    (lambda m, x, e: m.a(x).relu() + m.table[0], N0),
    (lambda m, x, e: m.a(x).t(), Rows("N", 1, 1, 0)),
    (lambda m, x, e: m.a(x).view(-1, 2, 2).permute(1, 0, 2), Rows("N", 1, 1, 0)),
    (lambda m, x, e: m.a(x).view(-1, 2), Rows("N", 0, 2, 0)),
    (lambda m, x, e: m.a(x).view(-1, 2).view(-1, 4), N0),
    (lambda m, x, e: m.a(x).sum(1), N0),
    (lambda m, x, e: m.a(x).sum(0), REPLICATED),
    (lambda m, x, e: m.a(x).t() @ m.a(x), REPLICATED),
    (lambda m, x, e: m.table @ m.a(x).t(), Rows("N", 1, 1, 0)),
    (lambda m, x, e: torch.stack([m.a(x), m.a(x)]), Rows("N", 1, 1, 0)),
    (lambda m, x, e: m.a(x).unsqueeze(0).unsqueeze(-1), Rows("N", 1, 1, 0)),
    (lambda m, x, e: m.a(x)[:, torch.tensor([0, 2])], N0),
    (lambda m, x, e: m.table[torch.arange(x.size(0)) % 3] * m.a(x), N0),
    (lambda m, x, e: torch.einsum("nd,kd->kn", m.a(x), m.table), Rows("N", 1, 1, 0)),
    (lambda m, x, e: m.a(x).max(dim=-1)[1], N0),
    (lambda m, x, e: torch.zeros(3, x.size(0), dtype=x.dtype) + m.a(x).sum(1), Rows("N", 1, 1, 0)),
    (lambda m, x, e: m.a(x).repeat(1, 3), N0),
    (lambda m, x, e: m.table.sum(), REPLICATED),
])  # fmt: skip
def test_placement_of_results(function, expected: Placement) -> None:
    assert placed(function) == expected


def test_an_operator_can_be_registered_from_outside() -> None:
    op = torch.ops.aten.special_bessel_j0.default
    assert find_rule(torch.ops.aten.linalg_qr.default) is None
    assert sylvie_fx.placement_rule(op)(pointwise) is pointwise
    assert find_rule(op) is pointwise


def test_a_packet_stands_for_all_overloads() -> None:
    @placement_rule(torch.ops.aten.erfinv)
    def rule(call):
        return pointwise(call)

    assert all(find_rule(getattr(torch.ops.aten.erfinv, o)) is rule for o in torch.ops.aten.erfinv.overloads())


def test_different_spaces_do_not_meet() -> None:
    same_rows([Rows("N"), Rows("N", 1)])
    with pytest.raises(Refused, match=r"E and N\*2"):
        same_rows([Rows("E"), Rows("N", 0, 2)])


def test_wrap() -> None:
    assert [wrap(d, 3) for d in (-3, -1, 0, 2)] == [0, 2, 0, 2]


@pytest.mark.parametrize(("equation", "ranks", "letters"), [
    ("nhd,hd->nh", [3, 2], (["nhd", "hd"], "nh")), ("ij,jk", [2, 2], (["ij", "jk"], "ik")), ("ii", [2], (["ii"], "")),
    ("n...,n...->n", [3, 3], (["n67", "n67"], "n")), ("...d,d", [3, 1], (["67d", "d"], "67")),
])  # fmt: skip
def test_letters_of_einsum(equation: str, ranks: list[int], letters: tuple[list[str], str]) -> None:
    assert einsum_letters(equation, ranks) == letters


def test_every_refusal_has_a_remedy() -> None:
    def dense(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        return torch.softmax(m.a(x) @ m.a(x).t(), -1)

    with pytest.raises(sylvie_fx.ir.errors.PassError) as raised:
        after(dense, "infer-placement")
    assert raised.value.where
    assert raised.value.why
    assert raised.value.remedy
