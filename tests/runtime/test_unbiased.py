"""What comes back over a coded backward pass is the gradient on average, tested statistically."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sylvie_fx.graphs.layout import RowLayout, exchange_plan
from sylvie_fx.ir.coding import EXACT, Coding
from sylvie_fx.kernels.wire import Rounding
from sylvie_fx.runtime.channel import shift_part
from sylvie_fx.runtime.coded_exchange import CodedHaloExchange, CodedLink
from sylvie_fx.runtime.exchange import HaloExchange, Link
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport

PARTS, ROWS, COLUMNS, DRAWS = 4, 24, 16, 600


def gradients(coding: Coding, moving: bool) -> list[tuple[Tensor, Tensor]]:
    """By rank: the exact gradient ``[own, columns]``, and what ``DRAWS`` steps give ``[draws, own, columns]``.

    Every rank reads every row, so that an owner adds gradients of three peers. Of the shift, the gradients of the steps
    before the measured ones are others (``moving``), so that its state is not what is sent.
    """
    owner = torch.arange(ROWS) % PARTS
    nodes = RowLayout(owner, PARTS)
    source = torch.arange(ROWS).repeat(PARTS)
    edges = RowLayout(torch.arange(PARTS).repeat_interleave(ROWS), PARTS)

    def rank(transport: Transport) -> tuple[Tensor, Tensor]:
        link = Link.make(
            exchange_plan(nodes, edges, source, transport.rank), transport, "exchange", torch.device("cpu")
        )
        halo = link.plan.own + link.plan.halo
        generator = torch.Generator().manual_seed(transport.rank)
        wanted, before = (torch.randn(halo, COLUMNS, generator=generator) for _ in range(2))

        def back(function: Any, *arguments: Any, gradient: Tensor = wanted) -> Tensor:
            own = torch.zeros(link.plan.own, COLUMNS, requires_grad=True)
            function.apply(own, *arguments).backward(gradient)
            assert own.grad is not None
            return own.grad

        exact, draws = back(HaloExchange, link), []
        for draw in range(DRAWS):
            site = CodedLink.make(link, nodes.rows(transport.rank), EXACT, coding, 1000 * draw)
            if moving:
                back(CodedHaloExchange, site, 0, gradient=before)
            draws.append(back(CodedHaloExchange, site, 1))
        return exact, torch.stack(draws)

    return run_ranks(PARTS, rank, 60.0)


@pytest.mark.parametrize(
    "coding",
    [Coding(1), Coding(1, "dithered"), Coding(1, "dithered", "shift"), Coding(2, "dithered", "shift")],
    ids=str,
)
def test_the_coded_gradient_path_is_unbiased(coding: Coding) -> None:
    """Each of 384 numbers is drawn 600 times with other seeds.

    A mean misses by more than 5 of its standard deviations with a chance below 6e-7, so any of the 384 in the four cases
    below 1e-3; the seeds are fixed, so the test always gives the same. The mean of the squared scores, each of variance
    2, is 1 within 0.36 (5 deviations over 384 numbers): a bias of a quarter of the mean's deviation everywhere is found.
    """
    scores = []
    for exact, draws in gradients(coding, moving=coding.variant == "shift"):
        deviation = draws.std(0) / DRAWS**0.5
        assert (deviation > 0).all()
        scores.append((draws.mean(0) - exact) / deviation)
    assert torch.cat(scores).abs().max() < 5.0
    assert abs(torch.cat(scores).square().mean() - 1.0) < 0.36


def test_errors_of_several_senders_do_not_add_up() -> None:
    """The variance of a sum over three peers is three variances, not nine: they round independently.

    600 x 384 draws know the ratio to some per cent; perfectly correlated errors would give 3.
    """
    same = Coding(1, "dithered")
    found = gradients(same, moving=False)
    variance = torch.cat([(draws - exact).square().mean(0) for exact, draws in found]).mean()
    alone = 13.1 / 12  # of one peer: a twelfth of the mean squared span of 16 Gaussian numbers
    assert 2.5 < variance / alone < 3.5


def test_the_part_is_that_of_the_measured_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    for columns in (16, 64, 256):
        x = torch.randn(4000, columns, generator=generator)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        stochastic = ((high - x) * (x - low)).mean()
        dithered = ((high - low).square() / 12).mean()
        assert shift_part(Rounding.STOCHASTIC, 1, columns) == pytest.approx(1 / (1 + float(stochastic)), rel=0.05)
        assert shift_part(Rounding.DITHERED, 1, columns) == pytest.approx(1 / (1 + float(dithered)), rel=0.05)
    assert shift_part(Rounding.DITHERED, 1, 1) == shift_part(Rounding.STOCHASTIC, 1, 1) == 0.5
    assert shift_part(Rounding.DITHERED, 8, 64) > 0.99
