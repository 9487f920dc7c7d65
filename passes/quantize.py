"""Give every exchange a codec, forward and backward apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.coding import ExchangeCoding
from sylvie_fx.ir.program import Program, meta, shape
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.dependence import depends_on_inputs_alone

EXCHANGES = (ops.halo_exchange, ops.halo_reduce, ops.relayout)


@dataclass(frozen=True)
class Quantize(Pass):
    """Number the exchanges and choose from the options how their rows travel (Sylvie's Low-bit Module).

    Requires: insert-halo.
    Ensures: every exchange has a site with a coding. A value that depends on inputs alone crosses once, exactly;
    numbers that are not floating point travel exactly; partial sums and moved rows are coded plain, since only rows
    that come back in the same place at every step have a reconstruction to differ from.

    Before::

        halo = sylvie.halo_exchange(h, 0, 0)

    After::

        halo = sylvie.halo_exchange(h, 0, 0, 0)
        codings (forward / backward):
          site 0: 1-bit rotated shift
    """

    name: ClassVar[str] = "quantize"

    def run(self, program: Program, context: PassContext) -> Program:
        """Choose a coding for each exchange that has none."""
        for node in program.graph.nodes:
            if node.target in EXCHANGES and len(node.args) < 4:
                site = len(program.codings)
                program.codings[site] = _coding(program, node, context)
                dim = node.args[2] if len(node.args) > 2 else 0
                node.args = (node.args[0], node.args[1], dim, site)
        return program


def _coding(program: Program, node: fx.Node, context: PassContext) -> ExchangeCoding:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if node.target is not ops.halo_reduce and depends_on_inputs_alone(program, source):
        return ExchangeCoding(once=True)
    if not source.meta["val"].dtype.is_floating_point:
        return ExchangeCoding()
    columns = math.prod(int(s) for s in shape(source) if not s.free_symbols)
    chosen = context.options.coding(program.mode, meta(node).module, columns)
    if node.target is ops.halo_exchange:
        return chosen
    forward = (
        replace(chosen.forward, variant="plain", rounding="stochastic") if chosen.forward.bits <= 8 else chosen.forward
    )
    return ExchangeCoding(forward, chosen.backward)
