"""The links between ranks of one host: how they find one another and connect."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from sylvie_fx.ir.errors import CommError
from sylvie_fx.runtime.shared_memory import SharedMemoryLink, supported

_HALF = 16
"""Characters of a token: the first half is an address, the other proves that who calls was told."""
_PATIENCE = 10.0
"""Seconds for what the kernel has to do alone."""


def connect_local(rank: int, host: str, gather: Callable[[str], Sequence[str]]) -> dict[int, SharedMemoryLink]:
    """Connect with the ranks of the same host; all ranks call it together.

    Args:
        rank: This rank.
        host: Name of its host.
        gather: Gives the values of all ranks, in their order, or raises where one has failed. Called twice, with at most
            100 characters.

    Returns:
        The links by rank. Two ranks share a host where its name, the running kernel and the network namespace are the
        same: a cluster whose machines have one name is no host. None where the system has no such links.

    Raises:
        CommError: A rank of this host could not be reached.
    """
    place, token = _place(host), secrets.token_hex(_HALF)
    links: dict[int, SharedMemoryLink] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        if place:
            listener.bind(_address(token))
            listener.listen(socket.SOMAXCONN)
            listener.settimeout(_PATIENCE)
        known = [text.split("\n") for text in gather(f"{place}\n{token}")]
        here = [peer for peer, (theirs, _) in enumerate(known) if peer != rank and place and theirs == place]
        peer = rank
        try:
            for peer in (p for p in here if p < rank):
                links[peer] = SharedMemoryLink(_called(known[peer][1], rank))
            gather("")  # now everybody has called
            while len(links) < len(here):
                peer, connection = _answered(listener, token)
                links[peer] = SharedMemoryLink(connection)
        except OSError as error:
            raise CommError(
                f"rank {rank} could not connect to rank {peer} of its host through a Unix socket",
                why=str(error) or type(error).__name__,
                remedy="give each rank a value of its own of SYLVIE_FX_HOST: they then talk as ranks of different hosts do",
            ) from error
    return links


def _place(host: str) -> str:
    """Stands for the machine, its boot and the network namespace; empty where there are no links of this kind."""
    if not supported():
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return hashlib.sha256(f"{host} {boot} {os.stat('/proc/self/ns/net').st_ino}".encode()).hexdigest()


def _address(token: str) -> str:
    """In Linux's abstract name space, where nothing is left of it when the socket is closed."""
    return f"\0sylvie_fx-{token[:_HALF]}"


def _called(token: str, rank: int) -> socket.socket:
    """The connection to the rank that listens with this token."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(_address(token))
        connection.send(f"{token[_HALF:]} {rank}".encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _answered(listener: socket.socket, token: str) -> tuple[int, socket.socket]:
    """The next rank that has called, and the connection to it; who does not know the token is sent away."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_PATIENCE)
        proof, _, peer = connection.recv(64).decode(errors="replace").partition(" ")
        if secrets.compare_digest(proof.encode(), token[_HALF:].encode()):
            return int(peer), connection
        connection.close()
