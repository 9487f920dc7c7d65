"""Ranks as processes: exchanges between GPUs over NCCL, through shared memory within a host, else over gloo."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sylvie_fx.ir.errors import CommError, OptionError
from sylvie_fx.ir.source import running_line
from sylvie_fx.runtime.collectives import Collectives
from sylvie_fx.runtime.failures import FailureBoard, doing_at
from sylvie_fx.runtime.in_flight import DevicePending, HostPending, NearPending, raw
from sylvie_fx.runtime.in_process import InProcessGroup
from sylvie_fx.runtime.lanes import spare_core
from sylvie_fx.runtime.local_links import connect_local
from sylvie_fx.runtime.shared_memory import Key, SharedMemoryLink
from sylvie_fx.runtime.transport import (
    DEFAULT_TIMEOUT,
    DIVERGED,
    SAME_CALLS,
    Pending,
    Transport,
    check_buffers,
    something,
)

log = logging.getLogger(__name__)

#: What torchrun tells each process, all of which a process group needs.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: What has been numbered in each process group.
_NUMBERS: defaultdict[str, Counter[str]] = defaultdict(Counter)


class ProcessGroupTransport(Collectives):
    """The wire of one process; see Transport for the methods.

    Args:
        group: The process group, or None for the default one; its ranks are the ranks of this transport.
        timeout: Seconds that a wait lasts at most.

    Raises:
        CommError: There is no process group, or this process is not in it.
        OptionError: A timeout that is not positive.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        if not timeout > 0:
            raise OptionError(f"a timeout is a positive number of seconds, not {timeout}")
        if not dist.is_initialized():
            raise CommError(
                "there is no process group",
                remedy="start the script with `python -m sylvie_fx run -n 2 script.py`, or call init_process_group",
            )
        self._group = group or dist.group.WORLD
        if self._group is None or dist.get_rank(self._group) < 0:
            raise CommError("this process is not a member of the process group")
        self.rank, self.size, self.timeout = dist.get_rank(self._group), dist.get_world_size(self._group), timeout
        self.host = os.environ.get("SYLVIE_FX_HOST") or socket.gethostname()
        self.threaded, self.processes = self.size > 1 and spare_core(), self.size > 1
        self.bytes_sent = self.messages_sent = 0
        self._name = str(self._group.group_name)
        self._backends = _backends(dist.get_backend_config(self._group))
        if "cpu" not in self._backends:
            self.control_device = torch.device("cuda", torch.cuda.current_device())
        self._board = FailureBoard(dist.distributed_c10d._get_process_group_store(self._group), self.rank)
        self._links: dict[int, SharedMemoryLink] | None = None
        self._gathered = itertools.count()
        self._steps: Counter[str] = Counter()
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        self._stopped: str | None = None
        self._refused: str | None = None
        self._owns_group = False

    @classmethod
    def from_environment(cls, timeout: float = DEFAULT_TIMEOUT) -> ProcessGroupTransport:
        """The transport of the default group, which is made from torchrun's variables where there is none yet.

        Args:
            timeout: Seconds that a wait lasts at most, the first meeting of all ranks included.

        Raises:
            CommError: The variables are missing, or not all ranks came in time.
        """
        if dist.is_initialized():
            return cls(timeout=timeout)
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise CommError(
                f"there is no process group, and {', '.join(missing)} is not set",
                remedy="start the script with `python -m sylvie_fx run -n 2 script.py` or with torchrun",
            )
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        try:
            dist.init_process_group(_default_backend(), timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise CommError(
                f"rank {rank} could not meet the other ranks within {timeout:g} s",
                why=str(error).splitlines()[0],
                remedy=f"look at the output of the other {int(size) - 1} processes",
            ) from error
        transport = cls(timeout=timeout)
        transport._owns_group = True
        return transport

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str) -> Pending:
        """See Transport.exchange; every receive is posted before any send."""
        check_buffers(self.rank, self.size, sends, "sends", label)
        check_buffers(self.rank, self.size, receives, "receives", label)
        with self._lock:
            step = self._steps[label]
            self._steps[label] += 1
        name = f"{label!r} (step {step})"
        if self._stopped:
            raise CommError(f"rank {self.rank} can not start {name}: {self._stopped}")
        if self._refused is not None:
            self._refused = None
            self._board.withdraw()
        incoming = {peer: t for peer, b in enumerate(receives) if peer != self.rank and (t := something(b)) is not None}
        outgoing = {peer: t for peer, b in enumerate(sends) if peer != self.rank and (t := something(b)) is not None}
        with self._lock:
            self.messages_sent += len(outgoing)
            self.bytes_sent += sum(t.numel() * t.element_size() for t in outgoing.values())
        if _on_nccl([*incoming.values(), *outgoing.values()], self._backends):
            return self._exchange_nccl(incoming, outgoing)
        links = self._connected()
        far = self._exchange_gloo(
            {peer: buffer for peer, buffer in incoming.items() if peer not in links},
            {peer: buffer for peer, buffer in outgoing.items() if peer not in links},
            label, step, name,
        )  # fmt: skip
        if not links:
            return far
        started = time.monotonic()
        for peer in sorted(outgoing.keys() & links.keys()):
            try:
                links[peer].send(label, step, raw(outgoing[peer]), started + self.timeout)
            except (ConnectionError, TimeoutError) as error:
                raise self.lost(peer, name, error, time.monotonic() - started) from error
        near = [
            (peer, links[peer], Key(label, step, raw(b).numel()), b) for peer, b in incoming.items() if peer in links
        ]
        return NearPending(self, name, near, far)

    def _connected(self) -> Mapping[int, SharedMemoryLink]:
        """The links to the ranks of this host, made together with the first exchange."""
        with self._connecting:
            if self._links is None:
                self._links = connect_local(self.rank, self.host, self._gather) if self.size > 1 else {}
                if self._links:
                    log.info("rank %d reaches ranks %s through shared memory", self.rank, sorted(self._links))
        return self._links

    def _gather(self, text: str) -> list[str]:
        """A short text of every rank, over gloo."""
        own = torch.frombuffer(bytearray(text.encode().ljust(100)), dtype=torch.uint8)
        others = {peer: torch.empty_like(own) for peer in range(self.size) if peer != self.rank}
        number = next(self._gathered)
        name = f"the first meeting of the ranks ({number})"
        self._exchange_gloo(others, dict.fromkeys(others, own), "meeting", number, name).wait()
        return [bytes(others.get(peer, own).numpy()).decode().rstrip() for peer in range(self.size)]

    def _exchange_gloo(
        self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor], label: str, step: int, name: str
    ) -> HostPending:
        pending = HostPending(self, name)
        peer = self.rank
        try:
            for peer, buffer in incoming.items():
                # Two sends posted before two receives use one direction of the link at a time, at half the rate.
                host = torch.empty_like(buffer, device="cpu") if buffer.is_cuda else buffer
                work = dist.irecv(raw(host), group=self._group, group_src=peer, tag=_tag(label, step, buffer))
                pending.add(peer, work, host, buffer)
            for peer, buffer in outgoing.items():
                host = buffer.cpu()
                work = dist.isend(raw(host), group=self._group, group_dst=peer, tag=_tag(label, step, buffer))
                pending.add(peer, work, host, None)
        except RuntimeError as error:
            raise self.lost(peer, name, error, 0.0) from error
        return pending

    def _exchange_nccl(self, incoming: Mapping[int, Tensor], outgoing: Mapping[int, Tensor]) -> DevicePending:
        receives = [dist.P2POp(dist.irecv, raw(t), group=self._group, group_peer=p) for p, t in incoming.items()]
        sends = [dist.P2POp(dist.isend, raw(t), group=self._group, group_peer=p) for p, t in outgoing.items()]
        operations = receives + sends
        return DevicePending(dist.batch_isend_irecv(operations) if operations else [])

    def wires(self) -> str:
        """See Transport.wires."""
        near = sorted(self._links or ())
        ways = [f"through shared memory with ranks {', '.join(map(str, near))}"] if near else []
        ways += [f"over {self._backends['cpu']}"] if "cpu" in self._backends and len(near) < self.size - 1 else []
        ways += ["between GPUs over nccl"] if self._backends.get("cuda") == "nccl" else []
        return f"messages travel {', '.join(ways)}"

    def next_number(self, name: str) -> int:
        """See Transport.next_number; counted for the group, which several transports may share."""
        numbers = _NUMBERS[self._name]
        numbers[name] += 1
        return numbers[name] - 1

    def refuse(self, reason: str) -> None:
        """See Transport.refuse."""
        if self._stopped is None and self.size > 1:
            self._refused = reason
            self._board.report(self.rank, reason)
            weakly = weakref.WeakMethod(self._end_refused)
            atexit.register(lambda: (end := weakly()) and end())

    def _end_refused(self) -> None:
        """At the end of the process, while the store can still be asked: this rank did not go on."""
        if self._refused is not None:
            self.abort(self._refused)

    def abort(self, reason: str) -> None:
        """See Transport.abort; the connections of this rank are closed, so that nobody has to run into a timeout."""
        if self._stopped is None:
            self._stopped = f"this rank was aborted: {reason}"
            self._board.report(self.rank, reason)
            self._break_connections()

    def close(self) -> None:
        """See Transport.close; the process group is destroyed only where ``from_environment`` made it."""
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            dist.destroy_process_group()
        links, self._links = self._links or {}, {}
        for link in links.values():
            link.stop()
            link.close()
        self._stopped = self._stopped or "its transport is closed"

    def lost(self, peer: int, name: str, error: Exception | None, waited: float) -> CommError:
        """The error of a wait that did not end well, after telling the others and asking them who is to blame."""
        blocked = f"rank {self.rank} can not go on with {name}"
        if self._stopped is not None:
            return CommError(f"{blocked}: {self._stopped}")
        closed = error is not None and not isinstance(error, TimeoutError) and "timed out" not in str(error).lower()
        if closed:
            reason, why = f"closed its connection during {name}", "its process ended or was killed"
        else:
            reason, why = f"sent nothing for {waited:.3g} s in {name}", "it hangs, is too slow, or does other work"
        ahead, line = self._ahead(peer, name), running_line()
        self._stopped = f"rank {peer} {reason} before"
        self._board.report(peer, reason, name, line)
        self._break_connections()
        chain, remedy = self._board.explain(peer), f"look at the output of rank {peer}"
        known = chain[-1] if chain else None
        others = [one for one in chain if one.doing not in ("", name)]
        if known is not None and known.culprit == known.observer:
            peer, reason, why = known.culprit, "failed", known.reason
            remedy = f"look at the output of rank {peer}"
        elif known is not None and others and known.culprit in (self.rank, *(one.observer for one in chain)):
            peer, reason = others[0].observer, f"waits in {doing_at(others[0].doing, others[0].line)}"
            why, remedy = DIVERGED, SAME_CALLS
        elif ahead:
            why, remedy = f"it has sent {ahead} meanwhile: the ranks do different things", SAME_CALLS
        elif known is not None and known.culprit == self.rank:
            reason, why = "has given up", f"this rank {known.reason}"
            remedy = "find out what kept this rank, or give distribute() a longer timeout"
        elif known is not None:
            peer, reason, why = known.culprit, known.reason, f"rank {known.observer} saw it"
            remedy = f"look at the output of rank {peer}"
        self._stopped = f"rank {peer} {reason} before"
        return CommError(f"{blocked}: rank {peer} {reason}", where=line or None, why=why, remedy=remedy)

    def _ahead(self, peer: int, name: str) -> str:
        """Something that a rank of this host has sent and this rank has not begun; empty for none."""
        link = (self._links or {}).get(peer)
        for label, step, size in link.untaken() if link is not None else ():
            sent = f"{label!r} (step {step})"
            if sent == name:
                return f"it in another size, {size} bytes,"
            with self._lock:
                if self._steps[label] <= step:
                    return sent
        return ""

    def _break_connections(self) -> None:
        """Close the connections to all peers: their waits on this rank end now instead of at their timeout."""
        for link in (self._links or {}).values():
            link.stop()
        if self.size == 1 or self._backends.get("cpu") != "gloo":
            return
        # gloo has no call for it, but a receive that runs out closes every connection of its group.
        peer = (self.rank + 1) % self.size
        with contextlib.suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), group=self._group, group_src=peer, tag=0)
            if work is not None:
                work.wait(timedelta(milliseconds=1))


def default_transport(timeout: float = DEFAULT_TIMEOUT) -> Transport:
    """The process group where there is one or torchrun's variables ask for one; else this process alone."""
    if dist.is_initialized() or all(name in os.environ for name in _VARIABLES):
        return ProcessGroupTransport.from_environment(timeout)
    return InProcessGroup(1, timeout).transport(0)


def _tag(label: str, step: int, buffer: Tensor) -> int:
    """A tag in which label, step and size meet: what does not belong together is never delivered.

    gloo ends a process that receives more bytes than it has room for, so the size has to be part of it. Tag 0 is spare.
    """
    size = buffer.numel() * buffer.element_size()
    return zlib.crc32(f"{label}\0{step}\0{size}".encode()) % 0x7FFFFFFE + 1


def _on_nccl(buffers: Sequence[Tensor], backends: Mapping[str, str]) -> bool:
    return backends.get("cuda") == "nccl" and any(buffer.is_cuda for buffer in buffers)


def _backends(config: str) -> dict[str, str]:
    """``"cpu:gloo,cuda:nccl"`` as a mapping."""
    return dict(entry.split(":", 1) for entry in config.split(","))


def _default_backend() -> str:
    """NCCL beside gloo where every local process has a GPU of its own, else gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if dist.is_nccl_available() and torch.cuda.is_available() and torch.cuda.device_count() >= local:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        return "cpu:gloo,cuda:nccl"
    return "gloo"
