"""Network namespaces joined by links of a given rate, for benchmarks/link.py: each namespace plays a host.

Two namespaces share a veth pair; more of them are plugged into a bridge in a namespace of its own. A token bucket at
both ends of every cable limits both directions.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "wire"
#: Bits a second by name; None is a link without a token bucket.
RATES: dict[str, float | None] = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10, "unlimited": None}


class NoNetwork(Exception):
    """This machine or this user can not make namespaces; the text is one sentence that says why."""


@dataclass(frozen=True)
class Network:
    """Namespaces that exist.

    Attributes:
        names: One namespace a rank.
        addresses: The address of each.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def start(
        self, script: Path, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> list[subprocess.Popen[str]]:
        """Start a Python script in each namespace, with torchrun's variables set and gloo on the limited interface."""
        processes = []
        for rank, name in enumerate(self.names):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.names)),
                "LOCAL_RANK": "0",
                "SYLVIE_FX_HOST": name,  # namespaces share the name of the machine
                "LOCAL_WORLD_SIZE": str(len(self.names)),
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses have no names
                **variables,
            }
            command = ["ip", "netns", "exec", name, sys.executable, str(script), *arguments]
            processes.append(subprocess.Popen(command, env=environment, text=True))
        return processes


def check() -> None:
    """Raise NoNetwork where namespaces can not be made."""
    if os.geteuid() != 0:
        raise NoNetwork("benchmarks/link.py makes network namespaces, which only root may do: run it with sudo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoNetwork(
            f"benchmarks/link.py needs the programs ip and tc (package iproute2): no {' and no '.join(missing)}"
        )


@contextlib.contextmanager
def network(size: int, rate: str) -> Iterator[Network]:
    """Namespaces joined by links; they are gone afterwards, whatever happened.

    Args:
        size: Number of ranks.
        rate: A key of RATES.

    Raises:
        NoNetwork: The kernel or the user's rights do not allow it.
    """
    check()
    prefix = f"sfx{os.getpid()}"
    names = [f"{prefix}-{rank}" for rank in range(size)]
    switch = f"{prefix}-switch"
    made: list[str] = []
    try:
        for name in names if size == 2 else [*names, switch]:
            _run("ip", "netns", "add", name)
            made.append(name)
        if size == 2:
            _run(
                "ip",
                "link",
                "add",
                INTERFACE,
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                "name",
                INTERFACE,
                "netns",
                names[1],
            )
        else:
            _plug_in(names, switch, rate)
        addresses = []
        for rank, name in enumerate(names):
            addresses.append(f"10.93.0.{rank + 1}")
            _run("ip", "-n", name, "addr", "add", f"{addresses[-1]}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _limit(name, INTERFACE, rate)
        yield Network(tuple(names), tuple(addresses))
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _plug_in(names: Sequence[str], switch: str, rate: str) -> None:
    """A cable from each namespace to a bridge."""
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for rank, name in enumerate(names):
        port = f"port{rank}"
        _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _limit(switch, port, rate)


def _limit(name: str, interface: str, rate: str) -> None:
    bits = RATES[rate]
    if bits is None:
        return
    # Two milliseconds of tokens: with less, the timer of the kernel does not keep up with 10 Gbit/s.
    burst = max(256 * 1024, int(bits / 8 * 0.002))
    _run(
        "tc",
        "-n",
        name,
        "qdisc",
        "add",
        "dev",
        interface,
        "root",
        "tbf",
        "rate",
        rate,
        "burst",
        str(burst),
        "latency",
        "50ms",
    )


#: What ip and tc say where the kernel or the user's rights are too little.
_REFUSALS = ("not permitted", "not supported", "Unknown device type", "kind is unknown", "Permission denied")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip()
        text = f"`{' '.join(command)}` failed: {said or done.returncode}"
        # Any other failure is a fault of the command, which nobody should take for a machine that can not do it.
        raise NoNetwork(text) if any(words in said for words in _REFUSALS) else RuntimeError(text)
