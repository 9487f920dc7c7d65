"""Send the gradients of parameters in buckets, each as soon as backward has finished it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED
from sylvie_fx.ir.program import Program, meta
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder


@dataclass(frozen=True)
class BucketGradients(Pass):
    """Reduce gradients in one bucket for each stretch between two waits, while backward works on the stretch before it.

    Autograd runs what was recorded last first: a bucket's ``sync_start`` stands right in front of the first reader of its
    parameters, so that its backward comes when all their gradients are complete. The backward of ``sync_finish`` waits.

    Requires: sync-gradients; after schedule, since the order of the graph makes the buckets.
    Ensures: the same gradients to the last bit.

    Before::

        sync = sylvie.sync_gradients([w1, w2])
        w1_synced, w2_synced = getitem(sync, 0), getitem(sync, 1)

    After::

        sync = sylvie.sync_finish([w1, w2])
        w1_synced, w2_synced = getitem(sync, 0), getitem(sync, 1)
        bucket_0 = sylvie.sync_start([w1_synced], [0])
        ...
        bucket_1 = sylvie.sync_start([w2_synced], [1])
    """

    name: ClassVar[str] = "bucket-gradients"

    def run(self, program: Program, context: PassContext) -> Program:
        """Split the one bucket of a train program; an eval program has no gradients to hide."""
        found = [n for n in program.graph.nodes if n.target is ops.sync_gradients]
        if program.mode == "train" and found:
            _bucket(program, found[0])
        return program


def _bucket(program: Program, sync: fx.Node) -> None:
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    waits = [place[n] for n in program.graph.nodes if n.target in (ops.halo_wait, ops.halo_exchange)]
    buckets: dict[int, list[fx.Node]] = {}
    for item in sync.users:
        if item.users:
            first = min(place[user] for user in item.users)
            buckets.setdefault(sum(wait < first for wait in waits), []).append(item)
    for item in reversed(list(sync.users)):
        sync.append(item)
    sync.target = ops.sync_finish
    for number, items in sorted(buckets.items()):
        build = Builder(min((user for item in items for user in item.users), key=place.__getitem__))
        values, positions = [item.meta["val"] for item in items], [item.args[1] for item in items]
        start = build.call(ops.sync_start, items, positions, val=values, place=REPLICATED)
        start.name = f"bucket_{number}"
        meta(start).where = meta(start).module = ""
        for i, item in enumerate(items):
            read = build.call(operator.getitem, start, i, val=item.meta["val"], place=REPLICATED)
            meta(read).where = meta(read).module = ""
            item.replace_all_uses_with(read, delete_user_cb=lambda user, start=start: user is not start)  # type: ignore[misc]
