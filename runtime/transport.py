"""What the machine needs from a wire: exchanges, a few collectives, and errors that name a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from sylvie_fx.ir.errors import CommError

#: Why a wait has no end, and what to do, where ranks wait for each other.
DIVERGED = "the ranks do different things, and wait for each other"
SAME_CALLS = "make the same calls in the same order on every rank; where one rank prints a result, let all of them compute it first"

ReduceOp = Literal["sum", "max", "min"]

#: Seconds that a rank waits for another before it gives up, where nothing else is said.
DEFAULT_TIMEOUT = 300.0


@runtime_checkable
class Pending(Protocol):
    """An exchange in flight; its buffers belong to the transport until ``wait`` has returned."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until every buffer is received and every sent buffer is free again; a second call does nothing.

        Args:
            timeout: Seconds, or None for the transport's own.

        Raises:
            CommError: A peer died, raised or sent nothing in time; the text names it, the label and the step.
        """

    def done(self) -> bool:
        """Whether ``wait`` would return, or raise, without blocking."""


@runtime_checkable
class Transport(Protocol):
    """The wire of one rank; calls with the same label must come in the same order on every rank.

    Attributes:
        rank: This rank, 0 to size - 1.
        size: Number of ranks.
        timeout: Seconds that a wait lasts at most.
        host: Names the machine that this rank runs on.
        threaded: Whether there is a wire that threads of a machine can wait for while it computes.
        processes: Whether ranks are processes, between which bytes take their time.
    """

    rank: int
    size: int
    timeout: float
    host: str
    threaded: bool
    processes: bool

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent since the start."""

    @property
    def messages_sent(self) -> int:
        """Messages sent since the start."""

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], label: str) -> Pending:
        """Start one message to and from every peer.

        Args:
            sends: Per peer a contiguous tensor of any dtype; None or zero elements: nothing. The own index is ignored.
            receives: Per peer a preallocated contiguous tensor of the bytes that the peer sends; filled after ``wait``.
            label: Names the exchange in errors, and keeps messages of different exchanges apart.

        Raises:
            CommError: The transport has failed or is closed, or the buffers are malformed.
        """

    def all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Tensor:
        """Combine the tensors of all ranks in rank order: a new tensor, detached, with the same bits on every rank."""

    def start_all_reduce(self, tensor: Tensor, label: str, op: ReduceOp = "sum") -> Callable[[], Tensor]:
        """Begin what ``all_reduce`` does; the returned function ends it, and is called in the same order on every rank."""

    def all_gather_object(self, value: Any, label: str) -> list[Any]:
        """The small picklable values of all ranks, in rank order."""

    def barrier(self, label: str) -> None:
        """Return when every rank has called it."""

    def wires(self) -> str:
        """What messages travel over, for people to read; known once something was exchanged."""

    def next_number(self, name: str) -> int:
        """0, 1, …: tells things apart that are named alike, and that every rank makes in the same order."""

    def refuse(self, reason: str) -> None:
        """Note that this rank has raised, before it sent anything, what all ranks are expected to raise alike.

        Others that wait for it all the same learn the reason when their wait ends: at the end of this process, or of their
        patience. The note is forgotten when this rank exchanges again.
        """

    def abort(self, reason: str) -> None:
        """Tell the others that this rank has failed: their waits raise a CommError with its name and the reason."""

    def close(self) -> None:
        """Release threads and connections; a second call does nothing."""


def check_buffers(rank: int, size: int, buffers: Sequence[Tensor | None], what: str, label: str) -> None:
    """Raise a CommError where an exchange was given a malformed list of buffers.

    Args:
        rank: The rank whose entry is ignored.
        size: Number of entries that there must be.
        buffers: One contiguous tensor or None for each peer.
        what: "sends" or "receives", for the message.
        label: The exchange, for the message.
    """
    if len(buffers) != size:
        raise CommError(f"exchange {label!r} on rank {rank} was given {len(buffers)} {what} for {size} ranks")
    for peer, buffer in enumerate(buffers):
        if peer != rank and buffer is not None and not buffer.is_contiguous():
            raise CommError(
                f"exchange {label!r} on rank {rank}: the entry of rank {peer} in {what} is not contiguous",
                why=f"its shape is {tuple(buffer.shape)} with strides {buffer.stride()}",
                remedy="call .contiguous() first",
            )


def something(buffer: Tensor | None) -> Tensor | None:
    """The buffer without its autograd history, or None where there is nothing to transfer."""
    return None if buffer is None or buffer.numel() == 0 else buffer.detach()
