"""Ranks as threads of one process: the transport of verify(), of tests and of a model that runs alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from sylvie_fx.ir.errors import CommError, OptionError
from sylvie_fx.ir.source import running_line
from sylvie_fx.runtime.collectives import Collectives
from sylvie_fx.runtime.failures import doing_at
from sylvie_fx.runtime.transport import DEFAULT_TIMEOUT, DIVERGED, SAME_CALLS, check_buffers, something

_T = TypeVar("_T")


class _Address(NamedTuple):
    """Where a message lies until its receiver takes it."""

    source: int
    target: int
    label: str
    step: int


class _Blocked(NamedTuple):
    """What a rank waits in, for which rank, and in which thread."""

    sender: int
    doing: str
    thread: int


class InProcessGroup:
    """The mailbox that the ranks of one process share.

    Args:
        size: Number of ranks, at least 1.
        timeout: Seconds that a rank waits for another.

    Raises:
        OptionError: A size below 1, or a timeout that is not positive.
    """

    def __init__(self, size: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        if size < 1:
            raise OptionError(f"a group needs at least one rank, not {size}")
        if not timeout > 0:
            raise OptionError(f"a timeout is a positive number of seconds, not {timeout}")
        self.size, self.timeout = size, timeout
        self._lock = threading.Lock()
        # One condition for all would wake every rank for every message of any.
        self._awaited: dict[_Address, threading.Condition] = {}
        self._mail: dict[_Address, Tensor] = {}
        self._blocked_on: dict[int, _Blocked] = {}
        self._refused: dict[int, str] = {}
        self._finished: set[int] = set()
        self._failure: tuple[int, str] | None = None

    def transport(self, rank: int) -> InProcessTransport:
        """The wire of one rank; make one per rank, and use it in that rank's thread."""
        if not 0 <= rank < self.size:
            raise OptionError(f"rank {rank} is not one of {self.size}")
        return InProcessTransport(self, rank)

    def _post(self, address: _Address, message: Tensor) -> None:
        with self._lock:
            self._mail[address] = message
            if address in self._awaited:
                self._awaited[address].notify()

    def _has(self, address: _Address) -> bool:
        with self._lock:
            return address in self._mail

    def _take(self, address: _Address, deadline: float, timeout: float) -> Tensor:
        """The message at an address, waited for until a time of the monotonic clock; the text names the whole timeout.

        Raises:
            CommError: Its sender failed, finished without sending it, or sent nothing in time.
        """
        receiver, sender = address.target, address.source
        context = f"rank {receiver} can not go on with {address.label!r} (step {address.step})"
        with self._lock:
            if address in self._mail:
                return self._mail.pop(address)
            self._blocked_on[receiver] = _Blocked(
                sender, f"{address.label!r} (step {address.step})", threading.get_ident()
            )
            arrival = self._awaited[address] = threading.Condition(self._lock)
            try:
                while address not in self._mail:
                    self._raise_failure(context)
                    if sender in self._finished:
                        raise CommError(
                            f"{context}: rank {sender} has finished without sending its message",
                            where=running_line() or None,
                            why=self._refused.get(sender, "the ranks do not run the same program"),
                        )
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._late(address, context, timeout)
                    arrival.wait(left)
                return self._mail.pop(address)
            finally:
                del self._awaited[address]
                self._blocked_on.pop(receiver, None)

    def _late(self, address: _Address, context: str, timeout: float) -> CommError:
        """The error of a wait that was too long: who waits for whom is followed to a rank that waits for nobody."""
        rank, seen = address.source, [address.target]
        while rank not in seen and (following := self._blocked_on.get(rank)) is not None:
            seen.append(rank)
            rank = following.sender
        line = running_line() or None
        if rank not in seen:
            reason = self._refused.get(rank)
            why = reason or "it hangs, is slower than the timeout, or runs another program"
            said = "failed" if reason else f"sent nothing for {timeout:.3g} s"
            return CommError(f"{context}: rank {rank} {said}", where=line, why=why)
        other = self._blocked_on[address.source]
        doing = doing_at(other.doing, running_line(other.thread))
        return CommError(
            f"{context}: rank {address.source} waits in {doing}", where=line, why=DIVERGED, remedy=SAME_CALLS
        )

    def _raise_failure(self, context: str) -> None:
        if self._failure is not None:
            rank, reason = self._failure
            raise CommError(f"{context}: rank {rank} failed", why=reason)

    def _fail(self, rank: int, reason: str) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = (rank, reason)
            self._wake_all()

    def _finish(self, rank: int) -> None:
        with self._lock:
            self._finished.add(rank)
            self._wake_all()

    def _wake_all(self) -> None:
        for arrival in self._awaited.values():
            arrival.notify()


class InProcessTransport(Collectives):
    """One rank of an InProcessGroup; see Transport for the methods."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self.rank, self.size, self.timeout = rank, group.size, group.timeout
        self.bytes_sent = self.messages_sent = 0
        self._group = group
        self._steps: Counter[str] = Counter()
        self.threaded, self.processes, self.host = False, False, "this process"
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._closed = False

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str) -> _Receipt:
        """See Transport.exchange; what is sent is copied at once."""
        if self._closed:
            raise CommError(f"exchange {label!r} on rank {self.rank}: its transport is closed")
        check_buffers(self.rank, self.size, sends, "sends", label)
        check_buffers(self.rank, self.size, receives, "receives", label)
        with self._lock:
            step = self._steps[label]
            self._steps[label] += 1
        with self._group._lock:
            self._group._raise_failure(f"rank {self.rank} can not start {label!r} (step {step})")
            self._group._refused.pop(self.rank, None)
        expected: list[tuple[_Address, Tensor]] = []
        for peer in range(self.size):
            outgoing, incoming = something(sends[peer]), something(receives[peer])
            if peer == self.rank:
                continue
            if outgoing is not None:
                self._group._post(_Address(self.rank, peer, label, step), outgoing.clone())
                with self._lock:
                    self.bytes_sent += outgoing.numel() * outgoing.element_size()
                    self.messages_sent += 1
            if incoming is not None:
                expected.append((_Address(peer, self.rank, label, step), incoming))
        return _Receipt(self._group, expected)

    def wires(self) -> str:
        """See Transport.wires."""
        return "ranks are threads of this process"

    def next_number(self, name: str) -> int:
        """See Transport.next_number."""
        self._numbers[name] += 1
        return self._numbers[name] - 1

    def refuse(self, reason: str) -> None:
        """See Transport.refuse."""
        with self._group._lock:
            self._group._refused[self.rank] = reason

    def abort(self, reason: str) -> None:
        """See Transport.abort."""
        self._group._fail(self.rank, reason)

    def close(self) -> None:
        """See Transport.close; a rank that waits for this one afterwards is told."""
        self._closed = True
        self._group._finish(self.rank)


class _Receipt:
    """The messages that one exchange still has to bring."""

    def __init__(self, group: InProcessGroup, expected: list[tuple[_Address, Tensor]]) -> None:
        self._group, self._expected = group, expected

    def wait(self, timeout: float | None = None) -> None:
        """See Pending.wait."""
        timeout = self._group.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while self._expected:
            address, buffer = self._expected[0]
            message = self._group._take(address, deadline, timeout)
            if message.dtype != buffer.dtype or message.numel() != buffer.numel():
                raise CommError(
                    f"rank {address.target} expected {buffer.numel()} x {buffer.dtype} from rank {address.source} in "
                    f"{address.label!r} (step {address.step}) and got {message.numel()} x {message.dtype}",
                    why="the ranks hold different layouts",
                )
            buffer.copy_(message.reshape(buffer.shape))
            self._expected.pop(0)

    def done(self) -> bool:
        """See Pending.done."""
        return self._group._failure is not None or all(self._group._has(address) for address, _ in self._expected)


def run_ranks(size: int, fn: Callable[[InProcessTransport], _T], timeout: float = DEFAULT_TIMEOUT) -> list[_T]:
    """Run a function as every rank of a group, one thread each, and give each rank's result.

    Backward passes run in the thread of their rank, so a gradient may wait for another rank's.

    Args:
        size: Number of ranks.
        fn: Called with the rank's transport.
        timeout: Seconds that a rank waits for another.

    Raises:
        BaseException: The first that a rank raised, with a note that names the rank; the other ranks are woken and end.
    """
    group = InProcessGroup(size, timeout)
    results: dict[int, _T] = {}
    errors: list[tuple[int, BaseException]] = []

    def main(rank: int) -> None:
        transport = group.transport(rank)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(transport)
        except BaseException as error:  # a thread's boundary: kept, and raised in the caller's thread
            errors.append((rank, error))
            transport.abort(f"{type(error).__name__}: {error}")
        finally:
            transport.close()

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        for thread in threads:
            thread.join(0.05)
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) if errors else None)
    if not errors:
        return [results[rank] for rank in range(size)]
    rank, error = errors[0]
    stuck = [thread.name for thread in threads if thread.is_alive()]
    _add_note(error, f"raised by rank {rank} of {size}" + (f"; still running: {', '.join(stuck)}" if stuck else ""))
    raise error


def _add_note(error: BaseException, text: str) -> None:
    """BaseException.add_note, which Python 3.10 lacks."""
    error.__notes__ = [*getattr(error, "__notes__", []), text]
