"""Take an exchange apart into its start and its end, and the sums of neighbours around it into two parts."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED
from sylvie_fx.ir.program import Program, is_tensor, meta, placement, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitExchanges(Pass):
    """Split every exchange that repeats in each step, so that what needs no halo row can run while rows travel.

    The sum, mean or extreme of neighbours is taken over *inner* edges, whose sources are own rows, and is completed
    over *halo* edges. Whatever else reads the rows reads own and halo rows joined.

    Requires: quantize.
    Ensures: every exchange that is split has the pace that the options give it, synchronous ones the same values to the
    last bit. The own rows go through ``halo_start``, so that its backward adds what
    arrives to the gradient of the inner edges.

    Before::

        halo = sylvie.halo_exchange(h, 0, 0, 0)
        out = sylvie.spmm(halo, src, dst, weight, rows, 'sum')

    After::

        start = sylvie.halo_start(h, 0, 0)
        own, ticket = getitem(start, 0), getitem(start, 1)
        inner = sylvie.spmm_inner(own, src, dst, weight, rows, 'sum', 0)
        halo = sylvie.halo_wait(ticket, 0, 0)
        out = sylvie.spmm_halo(inner, halo, src, dst, weight, 'sum', 0)
    """

    name: ClassVar[str] = "split-exchanges"

    def run(self, program: Program, context: PassContext) -> Program:
        """Split the exchanges of whole rows; partial sums and moved rows stay as they are."""
        for node in list(program.graph.nodes):
            if node.target is ops.halo_exchange and _repeats(program, node):
                site = ops.exchange_site(node)
                assert site is not None
                program.paces[site] = context.options.pace(program.mode, meta(node).module)
                if context.options.policy is not None:
                    columns = math.prod(int(s) for s in shape(node) if not s.free_symbols)
                    program.near[site] = context.options.near(program.mode, meta(node).module, columns)
                _split(node)
        return program


def _repeats(program: Program, node: fx.Node) -> bool:
    site = ops.exchange_site(node)
    if site is None or program.codings[site].once or node.args[2] != 0:
        return False
    return is_tensor(node) and node.meta["val"].dtype.is_floating_point


def _split(node: fx.Node) -> None:
    rows, slot, _, site = node.args
    assert isinstance(rows, fx.Node)
    assert isinstance(slot, int)
    value, place = node.meta["val"], placement(node)
    build = Builder(node)
    ticket_value = value.new_empty((0,))
    start = build.call(ops.halo_start, rows, slot, site, val=(value, ticket_value), place=None)
    meta(start).placement = (place, REPLICATED)
    meta(start).considered = meta(node).considered
    own = build.call(operator.getitem, start, 0, val=value, place=place)
    ticket = build.call(operator.getitem, start, 1, val=ticket_value, place=REPLICATED)
    sums = [user for user in node.users if _is_sum_of(user, node)]
    inner = {user: _inner(user, own, slot) for user in sums}
    # In front of its first reader, so that a pipeline without the schedule pass overlaps what it can.
    build = Builder(min(node.users, default=node.next))
    halo = build.call(ops.halo_wait, ticket, slot, site, val=value, place=place)
    for new, name in ((start, "start"), (own, "own"), (ticket, "ticket"), (halo, "halo")):
        new.name = f"{node.name.removesuffix('_exchange')}_{name}" if "halo" in node.name else f"{node.name}_{name}"
        meta(new).where, meta(new).module = meta(node).where, meta(node).module
    if len(sums) < len(node.users):  # now, since the first reader may be a sum, which is replaced below
        whole = build.call(aten.cat.default, [own, halo], 0, val=value, place=place)
        meta(whole).where, meta(whole).module = meta(node).where, meta(node).module
        node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in sums)
    for user in sums:
        _complete(user, inner[user], halo, slot)
    node.graph.erase_node(node)


def _is_sum_of(user: fx.Node, rows: fx.Node) -> bool:
    return (user.target is ops.spmm and user.args[0] is rows and rows not in user.args[1:]
            and isinstance(user.meta["val"], Tensor))  # fmt: skip


def _inner(user: fx.Node, own: fx.Node, slot: int) -> fx.Node:
    _, src, dst, weight, count, reduce = user.args
    return Builder(user).call(
        ops.spmm_inner, own, src, dst, weight, count, reduce, slot, val=user.meta["val"], place=placement(user)
    )


def _complete(user: fx.Node, inner: fx.Node, halo: fx.Node, slot: int) -> None:
    _, src, dst, weight, _, reduce = user.args
    out = Builder(user).call(
        ops.spmm_halo, inner, halo, src, dst, weight, reduce, slot, val=user.meta["val"], place=placement(user)
    )
    user.replace_all_uses_with(out)
    user.graph.erase_node(user)
    out.name = user.name
