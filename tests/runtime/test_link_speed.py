from __future__ import annotations

import math

import torch

from sylvie_fx.runtime.in_process import InProcessTransport, run_ranks
from sylvie_fx.runtime.link_speed import LinkSpeed, measure_link, usual_link
from sylvie_fx.runtime.metered import MeteredTransport


def test_all_ranks_count_with_the_same_power_of_ten() -> None:
    found = run_ranks(3, lambda transport: measure_link(transport, torch.device("cpu")), 60.0)
    assert len(set(found)) == 1
    assert math.log10(found[0].link).is_integer()
    assert found[0].measured is not None
    assert found[0].measured > 0


def test_ranks_of_one_process_measure_nothing_and_measuring_is_not_counted() -> None:
    def rank(transport: object) -> tuple[LinkSpeed, LinkSpeed, int]:
        metered = MeteredTransport(transport)  # type: ignore[arg-type]
        known = metered.link_speed(torch.device("cpu"), measured=True)
        metered.processes = True
        found = metered.link_speed(torch.device("cpu"), measured=True)
        metered.barrier("counts what was sent and is no exchange")
        return known, found, metered.meter.bytes_reduced

    for known, found, counted in run_ranks(2, rank, 60.0):
        assert known == LinkSpeed(1.0)
        assert found.measured is not None
        assert counted == 1


def test_what_is_usual_depends_on_hosts_and_cores_alone() -> None:
    def usual(hosts: list[str]) -> list[LinkSpeed]:
        def rank(transport: InProcessTransport) -> LinkSpeed:
            transport.host = hosts[transport.rank]
            return usual_link(transport, torch.device("cpu"))

        return run_ranks(len(hosts), rank, 60.0)

    threads = torch.get_num_threads()
    assert usual(["a", "a"]) == [LinkSpeed(10.0 / threads, "between the processes of a host")] * 2
    assert usual(["a", "b", "a"]) == [LinkSpeed(1.0, "between hosts")] * 3


def test_it_says_what_was_measured() -> None:
    assert str(LinkSpeed(1.0)) == "1 Gbit/s a core"
    assert str(LinkSpeed(1.0, "between hosts")) == "1 Gbit/s a core, as is usual between hosts"
    assert (
        str(LinkSpeed(0.1, "", 0.93, 8))
        == "0.1 Gbit/s a core, rounded from 0.93 measured between ranks and 8 cores a rank"
    )
