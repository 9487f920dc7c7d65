"""Let a dropout take the ReLU in front of it along."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder, copy_meta, replace


@dataclass(frozen=True)
class FuseRelu(Pass):
    """Make a ReLU that a dropout alone reads part of the dropout.

    Forward, one sweep over the rows instead of two; backward, one instead of two, which needs neither the ReLU's result nor
    the mask: what stayed is above zero in the dropout's own result.

    Requires: place-halos, which may let the ReLU's rows cross.
    Ensures: the same bits, forward and backward, as long as gradients are finite.

    Before::

        relu = aten.relu(h)
        out = sylvie.node_dropout(relu, ids_0, 0.5, 0, 0)

    After::

        out = sylvie.node_dropout(h, ids_0, 0.5, 0, 0, True)
    """

    name: ClassVar[str] = "fuse-relu"

    def run(self, program: Program, context: PassContext) -> Program:
        """Fuse each pair."""
        for node in list(program.graph.nodes):
            if node.target is ops.node_dropout and len(node.args) < 6:
                _fuse(node)
        return program


def _fuse(dropout: fx.Node) -> None:
    raised, keys, p, site, dim = (*dropout.args, 0)[:5]
    if not isinstance(raised, fx.Node) or raised.target is not torch.ops.aten.relu.default or len(raised.users) != 1:
        return
    new = Builder(dropout).call(ops.node_dropout, raised.args[0], keys, p, site, dim, True, val=dropout.meta["val"])
    copy_meta(dropout, new)
    replace(dropout, new)
    raised.graph.erase_node(raised)
