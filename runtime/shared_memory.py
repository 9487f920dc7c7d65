"""Messages between two processes of one host: bytes in shared memory, announced over a Unix socket.

Through the loopback device gloo takes twenty times as long for a small message and two to five times for a large one
(docs/design.md). The memory is anonymous (memfd) and goes to the peer as a file descriptor over the socket, so that it needs
no name, no room in /dev/shm, and nobody to clean up behind a killed process; the socket also says at once that a peer has
ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

#: What packets begin with: kind, bytes of the label, step, bytes of the message, number of the block.
_HEADER = struct.Struct("=BHqqq")
_INLINE, _IN_BLOCK, _FREE = range(3)
#: A message of at most so many bytes travels in its packet.
INLINE_BYTES = 4096
_LARGEST_PACKET = _HEADER.size + (1 << 16) + INLINE_BYTES  # the length of a label takes 16 bits
#: Bytes of the smallest piece of memory; others are twice, four times … as large.
_SMALLEST_BLOCK = 1 << 16
_INT = struct.Struct("=i")
_ONE_DESCRIPTOR = socket.CMSG_SPACE(_INT.size)


class Key(NamedTuple):
    """What a message must agree in with who waits for it."""

    label: str
    step: int
    size: int


class _Block(NamedTuple):
    number: int
    memory: Tensor
    descriptor: int | None  # until the peer has it


_Message: TypeAlias = "bytes | int"  # what came in the packet, or the number of the peer's block that holds it


def supported() -> bool:
    """Whether this system has what a link is made of: Linux does."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class SharedMemoryLink:
    """One peer; any thread may send and take, and messages of one key arrive in the order in which they were sent.

    Args:
        connection: A connected Unix socket that keeps packets apart (SEQPACKET); belongs to the link from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        # A deleted model closes nothing by itself, and Python warns of a socket that is collected open.
        self._close = weakref.finalize(self, connection.close)
        self._close.atexit = False  # others may wait for what still lies in it
        self._writing = threading.Lock()
        # Guards all below. One of the waiting threads reads the socket; it tells the others what has come.
        self._changed = threading.Condition()
        self._is_read = False
        self._packet = bytearray(_LARGEST_PACKET)
        self._arrived: defaultdict[Key, deque[_Message]] = defaultdict(deque)
        self._ended = False
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._lent: dict[int, _Block] = {}
        self._blocks = 0
        self._theirs: dict[int, Tensor] = {}

    def send(self, label: str, step: int, message: Tensor, deadline: float) -> None:
        """Send a copy of some bytes.

        Args:
            label: Names the exchange.
            step: Which exchange of that label.
            message: uint8, one dimension, contiguous, on any device.
            deadline: Until when to wait where the peer takes nothing; a time of the monotonic clock.

        Raises:
            ConnectionError: The peer has ended.
            TimeoutError: It has taken nothing until the deadline.
        """
        size, name = message.numel(), label.encode()
        if size <= INLINE_BYTES:
            header = _HEADER.pack(_INLINE, len(name), step, size, 0)
            self._write(header + name + message.cpu().numpy().tobytes(), None, deadline)
            return
        block = self._block(size)
        block.memory[:size].copy_(message)
        header = _HEADER.pack(_IN_BLOCK, len(name), step, size, block.number)
        try:
            self._write(header + name, block.descriptor, deadline)
        finally:
            if block.descriptor is not None:
                os.close(block.descriptor)

    def take(self, key: Key, into: Tensor, deadline: float) -> None:
        """Wait for a message.

        Args:
            key: Which one.
            into: uint8, ``[key.size]``, contiguous, on any device.
            deadline: A time of the monotonic clock.

        Raises:
            ConnectionError: The peer has ended and left no such message.
            TimeoutError: It has not sent it until the deadline.
        """
        message = self._await(key, deadline)
        if isinstance(message, bytes):
            into.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
            return
        into.copy_(self._theirs[message][: key.size])
        with contextlib.suppress(ConnectionError):  # a peer that has ended needs no memory back
            self._write(_HEADER.pack(_FREE, 0, 0, 0, message), None, deadline)

    def has(self, key: Key) -> bool:
        """Whether ``take`` would return, or raise, at once."""
        self._read_now()
        with self._changed:
            return self._ended or bool(self._arrived.get(key))

    def untaken(self) -> list[Key]:
        """What has arrived and was not taken yet, in the order of arrival."""
        self._read_now()
        with self._changed:
            return list(self._arrived)

    def stop(self) -> None:
        """End the connection: waits of both ends raise now. The descriptor stays open, since threads may wait at it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give everything back; nobody may wait any more."""
        self._close()

    def _await(self, key: Key, deadline: float) -> _Message:
        while True:
            with self._changed:
                if waiting := self._arrived.get(key):
                    message = waiting.popleft()
                    if not waiting:
                        del self._arrived[key]
                    return message
                if self._ended:
                    raise ConnectionError("the connection has ended")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                if self._is_read:
                    self._changed.wait(left)
                    continue
                self._is_read = True
            self._read(left)

    def _read_now(self) -> None:
        """Take what has come, unless another thread does so."""
        with self._changed:
            if self._is_read or self._ended:
                return
            self._is_read = True
        self._read(0.0)

    def _read(self, seconds: float) -> None:
        """Take what has come, or comes within some seconds; the caller has set ``_is_read``."""
        packets: list[tuple[bytes, list[int]]] = []
        ended = False
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.poll(1000 * seconds)
            while not ended:
                try:
                    size, extra, _, _ = self._socket.recvmsg_into([self._packet], _ONE_DESCRIPTOR)
                except BlockingIOError:
                    break
                except ConnectionResetError:  # the peer ended with something unread; what it sent is still to be had
                    continue
                except OSError:  # closed on this side
                    size, extra = 0, []
                if size:
                    packets.append((bytes(self._packet[:size]), [_INT.unpack(data)[0] for _, _, data in extra]))
                else:
                    ended = True
        finally:
            with self._changed:
                for data, descriptors in packets:
                    self._handle(data, descriptors)
                self._ended |= ended
                self._is_read = False
                self._changed.notify_all()

    def _handle(self, data: bytes, descriptors: list[int]) -> None:
        kind, name_length, step, size, number = _HEADER.unpack_from(data)
        if kind == _FREE:
            block = self._lent.pop(number)._replace(descriptor=None)
            self._free[block.memory.numel()].append(block)
            return
        for descriptor in descriptors:
            self._theirs[number] = _mapped(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        body = _HEADER.size + name_length
        key = Key(data[_HEADER.size : body].decode(), step, size)
        self._arrived[key].append(data[body:] if kind == _INLINE else number)

    def _block(self, size: int) -> _Block:
        """Memory that the peer does not read any more, or new one."""
        room = max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())
        if not self._free[room]:
            self._read_now()
        with self._changed:
            if self._free[room]:
                block = self._free[room].pop()
            else:
                descriptor = os.memfd_create("sylvie_fx")
                os.ftruncate(descriptor, room)
                block = _Block(self._blocks, _mapped(descriptor, room), descriptor)
                self._blocks += 1
            self._lent[block.number] = block
        return block

    def _write(self, packet: bytes, descriptor: int | None, deadline: float) -> None:
        passed = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(descriptor))]
        with self._writing:
            while True:
                try:
                    self._socket.sendmsg([packet], passed)
                    return
                except BlockingIOError:
                    # The peer may be here as well, and goes on once somebody reads what it has sent.
                    self._read_now()
                except OSError as error:
                    raise ConnectionError("the connection has ended") from error
                if time.monotonic() >= deadline:
                    raise TimeoutError
                poll = select.poll()
                poll.register(self._socket, select.POLLIN | select.POLLOUT)
                poll.poll(1000 * max(0.0, deadline - time.monotonic()))


def _mapped(descriptor: int, size: int) -> Tensor:
    """uint8 ``[size]`` in the memory of a descriptor."""
    # mmap.mmap would keep a descriptor for each block.
    return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
