"""Which exchanges a bound program has on one rank, and how the rows of each travel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

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
from sylvie_fx.runtime.direction import Direction
from sylvie_fx.runtime.exchange import Link
from sylvie_fx.runtime.lanes import Courier
from sylvie_fx.runtime.metered import MeteredTransport
from sylvie_fx.runtime.tiers import Tiers


@dataclass(frozen=True, eq=False)
class HalfSite:
    """What crossings of a site are made of.

    Attributes:
        site: The site.
        link: The exchange.
        own_ids: int64: global numbers of this rank's rows.
        tiers: How rows travel, and for each rank whether they travel so to it.
        label: Names it in errors.
        alone: See Crossing.
    """

    site: int
    link: Link
    own_ids: Tensor
    tiers: list[tuple[Tier, list[bool]]]
    label: str
    alone: bool


class Halves:
    """Makes crossings: one for each exchange in two halves and each pass of a training step that runs over it.

    Args:
        sites: The exchanges.
        courier: Where their work runs.
        key: Mixes a site into the seed.
        line: Whether old rows are extrapolated.

    Attributes:
        ways: Every direction that was made.
    """

    def __init__(self, sites: Sequence[HalfSite], courier: Courier, key: Callable[[int], int], line: bool) -> None:
        self._sites, self._courier, self._key, self._line = sites, courier, key, line
        self.ways: list[Direction | Tiers] = []

    def make(self, turn: int) -> dict[int, Crossing]:
        """The crossings of a turn, by site."""
        return {item.site: self._crossing(item, f" pass {turn + 1}" if turn else "", turn) for item in self._sites}

    def _crossing(self, item: HalfSite, name: str, turn: int) -> Crossing:
        seed = self._key(item.site | turn << 20) & 0xFFFFFFFF
        made = Crossing.make(
            item.link, item.own_ids, item.tiers, item.label + name, self._courier, seed, line=self._line
        )
        made.alone = item.alone
        made.make_again = functools.partial(self._crossing, item, f"{name} again", turn)
        self.ways += [made.out, made.back]
        return made


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
        more: Makes others of them.
    """

    def __init__(
        self, program: Program, bound: Bound, links: Mapping[int, Link], transport: MeteredTransport, courier: Courier,
        options: Options, key: Callable[[int], int], name: str,
    ) -> None:  # fmt: skip
        self._program = program
        self.whole: dict[int, CodedLink] = {}
        halves: list[HalfSite] = []
        for node in program.graph.nodes:
            site = ops.exchange_site(node)
            if site is None or bound.plans[int(node.args[1])].total == 0:
                continue
            slot, coding = int(node.args[1]), program.codings[site]
            link, seed = links[slot], key(site) & 0xFFFFFFFF
            own_ids = bound.layouts[program.slots[slot].source].rows(bound.rank).to(link.send_rows[0].device)
            if node.target is ops.halo_start:
                readers = [user.target for own in node.users if own.args[1] == 0 for user in own.users]
                halves.append(HalfSite(
                    site, link, own_ids, _tiers(program, transport, site), f"{name} exchange {slot} site {site}",
                    readers == [ops.spmm_inner],
                ))  # fmt: skip
            elif not coding.once and (coding.forward, coding.backward) != (EXACT, EXACT):
                outward, backward = coding.forward, coding.backward
                if node.target is ops.halo_reduce:  # its forward pass is the way back
                    outward, backward = backward, outward
                self.whole[site] = CodedLink.make(link, own_ids, outward, backward, seed)
        self.more = Halves(halves, courier, key, options.stale == "line")
        self.halves = self.more.make(0)
        self._transport = transport

    def recode(self, crossings: Mapping[int, Crossing]) -> None:
        """Give the crossings of another pass the widths that are chosen for the first."""
        for site, crossing in crossings.items():
            if self._program.codings[site].auto:
                for first, other in zip(self.halves[site].channels(), crossing.channels(), strict=True):
                    other.coding = first.coding

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


def _tiers(program: Program, transport: MeteredTransport, site: int) -> list[tuple[Tier, list[bool]]]:
    """How rows of a site travel to which ranks."""
    far = Tier(program.codings[site], program.paces[site])
    if site not in program.near:
        return [(far, [True] * transport.size)]
    same = transport.same_host()
    return [(program.near[site], same), (far, [not one for one in same])]
