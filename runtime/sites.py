"""Which exchanges a bound program has on one rank, and how the rows of each travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sylvie_fx.ir import ops
from sylvie_fx.ir.coding import EXACT
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.pace import Tier
from sylvie_fx.ir.program import Program
from sylvie_fx.runtime.adaptive import WidthController
from sylvie_fx.runtime.bind import Bound
from sylvie_fx.runtime.channel import Channel
from sylvie_fx.runtime.coded_exchange import CodedLink
from sylvie_fx.runtime.crossing import Crossing
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.lanes import Courier
from sylvie_fx.runtime.metered import MeteredTransport


class Exchanges:
    """The exchanges that move rows on this graph; those in one piece that travel as they are need no entry.

    Args:
        program: The rewritten program.
        bound: Plans and layouts of this rank.
        links: By slot.
        transport: How ranks talk.
        courier: Where the work of exchanges in two halves runs.
        options: The options of distribute().
        key: Mixes a site into the seed.
        name: Of the machine, for errors.

    Attributes:
        whole: Coded exchanges in one piece, by site.
        halves: Exchanges in two halves, by site.
    """

    def __init__(
        self, program: Program, bound: Bound, links: Mapping[int, Link], transport: MeteredTransport, courier: Courier,
        options: Options, key: Callable[[int], int], name: str,
    ) -> None:  # fmt: skip
        self._program, self._transport = program, transport
        self.whole: dict[int, CodedLink] = {}
        self.halves: dict[int, Crossing] = {}
        for node in program.graph.nodes:
            site = ops.exchange_site(node)
            if site is None or bound.plans[int(node.args[1])].total == 0:
                continue
            slot, coding = int(node.args[1]), program.codings[site]
            link, seed = links[slot], key(site) & 0xFFFFFFFF
            own_ids = bound.layouts[program.slots[slot].source].rows(bound.rank).to(link.send_rows[0].device)
            if node.target is ops.halo_start:
                self.halves[site] = Crossing.make(
                    link, own_ids, self._tiers(site), f"{name} exchange {slot} site {site}", courier, seed,
                    line=options.stale == "line",
                )  # fmt: skip
                readers = [user.target for own in node.users if own.args[1] == 0 for user in own.users]
                self.halves[site].alone = readers == [ops.spmm_inner]
            elif not coding.once and (coding.forward, coding.backward) != (EXACT, EXACT):
                outward, backward = coding.forward, coding.backward
                if node.target is ops.halo_reduce:  # its forward pass is the way back
                    outward, backward = backward, outward
                self.whole[site] = CodedLink.make(link, own_ids, outward, backward, seed)

    def _tiers(self, site: int) -> list[tuple[Tier, list[bool]]]:
        """How rows of a site travel to which ranks."""
        program = self._program
        far = Tier(program.codings[site], program.paces[site])
        if site not in program.near:
            return [(far, [True] * self._transport.size)]
        same = self._transport.same_host()
        return [(program.near[site], same), (far, [not one for one in same])]

    def controller(self, options: Options) -> WidthController | None:
        """The controller of adaptive widths, where any exchange has them."""
        channels: list[tuple[Channel, bool]] = []
        # Partial sums go forward on the way back of their exchange.
        reducing = {ops.exchange_site(n) for n in self._program.graph.nodes if n.target is ops.halo_reduce}
        for site, (out, back) in self._coded().items():
            if self._program.codings[site].auto:
                channels += [(out, site in reducing), (back, site not in reducing)]
        return WidthController(channels, options, self._transport) if channels else None

    def _coded(self) -> dict[int, tuple[Channel, Channel]]:
        """The channels of whole exchanges, then of those in two halves whose widths adapt."""
        found = {site: (self.whole[site].out, self.whole[site].back) for site in sorted(self.whole)}
        halves = sorted(site for site in self.halves if self._program.codings[site].auto)
        return found | {site: self.halves[site].channels() for site in halves}

    @property
    def codings(self) -> dict[int, tuple[str, str]]:
        """The present codings of :meth:`_coded` by site, towards the halo and back."""
        return {site: (str(out.coding), str(back.coding)) for site, (out, back) in sorted(self._coded().items())}
