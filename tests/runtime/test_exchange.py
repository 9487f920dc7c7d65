"""Exchanges and their adjoints on in-process ranks, exact and coded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sylvie_fx.graphs.layout import RowLayout, exchange_plan
from sylvie_fx.ir.coding import EXACT, Coding
from sylvie_fx.runtime.coded_exchange import CodedHaloExchange, CodedHaloReduce, CodedLink
from sylvie_fx.runtime.exchange import AllReduce, HaloExchange, HaloReduce, Link, SyncGradients
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport

PARTS, ROWS = 3, 40


def case() -> tuple[RowLayout, RowLayout, Tensor]:
    generator = torch.Generator().manual_seed(3)
    owner = torch.randint(PARTS, (ROWS,), generator=generator)
    source, target = torch.randint(ROWS, (2, 120), generator=generator)
    return RowLayout(owner, PARTS), RowLayout(owner[target], PARTS), source


def on_ranks(run: Callable[[Transport, Link, RowLayout], Any]) -> list[Any]:
    nodes, edges, source = case()

    def rank(transport: Transport) -> Any:
        plan = exchange_plan(nodes, edges, source, transport.rank)
        return run(transport, Link.make(plan, transport, "exchange 0", torch.device("cpu")), nodes)

    return run_ranks(PARTS, rank, 30.0)


def test_the_backward_of_an_exchange_is_its_adjoint() -> None:
    nodes, edges, source = case()
    x = torch.randn(ROWS, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(120, 5, dtype=torch.float64)
    (x[source] * weight).sum().backward()

    def run(transport: Transport, link: Link, layout: RowLayout) -> Tensor:
        own = x.detach()[layout.rows(transport.rank)].requires_grad_()
        rows = HaloExchange.apply(own, link)[link.plan.local_index]
        (rows * weight[edges.rows(transport.rank)]).sum().backward()
        return own.grad

    for rank, gradient in enumerate(on_ranks(run)):
        torch.testing.assert_close(gradient, x.grad[nodes.rows(rank)], rtol=1e-12, atol=1e-12)


def test_partial_sums_are_added_at_their_owners() -> None:
    nodes, edges, source = case()
    values = torch.randn(120, 5, dtype=torch.float64)
    expected = torch.zeros(ROWS, 5, dtype=torch.float64).index_add(0, source, values)

    def run(transport: Transport, link: Link, layout: RowLayout) -> tuple[Tensor, Tensor]:
        mine = values[edges.rows(transport.rank)].requires_grad_()
        partial = mine.new_zeros(link.plan.own + link.plan.halo, 5).index_add(0, link.plan.local_index, mine)
        total = HaloReduce.apply(partial, link)
        (total * layout.rows(transport.rank).unsqueeze(1)).sum().backward()
        return total.detach(), mine.grad

    for rank, (total, gradient) in enumerate(on_ranks(run)):
        torch.testing.assert_close(total, expected[nodes.rows(rank)], rtol=1e-12, atol=1e-12)
        wanted = source[edges.rows(rank)].unsqueeze(1).expand(-1, 5).to(torch.float64)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a_coded_exchange_is_close_in_both_directions(bits: int) -> None:
    coding = Coding(bits, "nearest" if bits == 16 else "stochastic")
    # One quantum of a row: its range over the number of steps; 16 bits is bfloat16, 8 bits of precision.
    tolerance = 2.0**-7 if bits == 16 else 1.05 / (2**bits - 1)

    def run(transport: Transport, link: Link, layout: RowLayout) -> None:
        own = torch.rand(link.plan.own, 16).requires_grad_()
        site = CodedLink.make(link, layout.rows(transport.rank), coding, coding, 7)
        exact = HaloExchange.apply(own.detach(), link)
        rows = CodedHaloExchange.apply(own, site, 0)
        assert torch.equal(rows[: link.plan.own], own)
        assert float((rows - exact).abs().max()) <= tolerance
        gradient = torch.rand(rows.shape)
        rows.backward(gradient)
        twin = torch.zeros(link.plan.own, 16, requires_grad=True)
        HaloExchange.apply(twin, link).backward(gradient)
        copies = 1 + max(len(s) for s in link.send_rows)
        assert float((own.grad - twin.grad).abs().max()) <= tolerance * copies

    on_ranks(run)


def test_difference_coding_approaches_rows_that_stand_still() -> None:
    def run(transport: Transport, link: Link, layout: RowLayout) -> list[float]:
        generator = torch.Generator().manual_seed(transport.rank)
        own = torch.randn(link.plan.own, 32, generator=generator)
        site = CodedLink.make(link, layout.rows(transport.rank), Coding(1, "nearest", "difference"), EXACT, 7)
        CodedHaloExchange.apply(own, site, 0)  # the first message is exact
        own = own + torch.randn(own.shape, generator=generator)
        exact = HaloExchange.apply(own, link)
        return [float((CodedHaloExchange.apply(own, site, step) - exact).norm()) for step in range(1, 40)]

    for errors in on_ranks(run):
        assert errors[-1] < 0.05 * errors[0]


def test_a_coded_reduction_keeps_its_gradient_exact_where_asked() -> None:
    def run(transport: Transport, link: Link, layout: RowLayout) -> None:
        partial = torch.rand(link.plan.own + link.plan.halo, 8).requires_grad_()
        site = CodedLink.make(link, layout.rows(transport.rank), EXACT, Coding(8), 7)
        CodedHaloReduce.apply(partial, site, 0).sum().backward()
        assert torch.equal(partial.grad, torch.ones_like(partial))

    on_ranks(run)


def test_bytes_of_a_one_bit_exchange() -> None:
    def run(transport: Transport, link: Link, layout: RowLayout) -> tuple[int, int, int]:
        own = torch.randn(link.plan.own, 256)
        before = transport.bytes_sent
        HaloExchange.apply(own, link)
        exact = transport.bytes_sent - before
        site = CodedLink.make(link, layout.rows(transport.rank), Coding(1), Coding(1), 7)
        CodedHaloExchange.apply(own, site, 0)
        return exact, transport.bytes_sent - before - exact, sum(1 for s in link.send_rows if len(s))

    for exact, coded, messages in on_ranks(run):
        rows = exact // 1024
        assert exact == rows * 1024
        assert coded == rows * 36 + messages * 32


@pytest.mark.parametrize("shared", [False, True])
def test_all_reduce_sums_values_and_gradients(shared: bool) -> None:
    def run(transport: Transport, link: Link, layout: RowLayout) -> tuple[float, float, float, int]:
        value = torch.tensor([float(transport.rank + 1)], requires_grad=True)
        total, count = AllReduce.apply(transport, "total", shared, value, torch.ones(2))
        sent = transport.messages_sent
        (total * (6.0 if shared else transport.rank + 1)).sum().backward()
        total.detach().zero_()
        return count.tolist(), value.grad.item(), total.item(), transport.messages_sent - sent

    assert on_ranks(run) == [([3.0, 3.0], 6.0, 0.0, 0 if shared else PARTS - 1)] * PARTS


def test_parameters_without_a_part_in_the_loss_keep_no_gradient() -> None:
    def run(transport: Transport, link: Link, layout: RowLayout) -> tuple[Any, Any]:
        used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        a, _ = SyncGradients.apply(transport, "parameters", used, unused)
        (a * (transport.rank + 1)).sum().backward()
        return used.grad.tolist(), unused.grad

    assert on_ranks(run) == [([6.0, 6.0], None)] * PARTS
