"""Programs that every transport must run alike; each is a top-level function of a transport."""

from __future__ import annotations

import torch
from torch import Tensor

from sylvie_fx.runtime.transport import Transport

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def ring_of_dtypes(transport: Transport) -> list[Tensor]:
    """Everybody sends (own rank + dtype number) to everybody, one exchange a dtype, all in flight at once."""
    flights, received = [], []
    for number, dtype in enumerate(DTYPES):
        message = torch.full((3, 2), transport.rank + number).to(dtype)
        receives = [torch.zeros(3, 2).to(dtype) for _ in range(transport.size)]
        flights.append(transport.exchange([message] * transport.size, receives, f"dtype {number}"))
        received.append(receives)
    for flight in reversed(flights):
        flight.wait()
        assert flight.done()
        flight.wait()
    return [torch.stack([t.to(torch.complex128) for t in receives]) for receives in received]


def uneven(transport: Transport) -> list[list[float]]:
    """Rank r sends r + p rows to peer p, so some messages are empty; twice with one label, and both in flight."""
    flights, buffers = [], []
    for step in range(2):
        sends = [torch.full((transport.rank + peer,), 10.0 * transport.rank + step) for peer in range(transport.size)]
        receives: list[Tensor | None] = [torch.zeros(transport.rank + peer) for peer in range(transport.size)]
        receives[transport.rank] = None
        flights.append(transport.exchange(sends, receives, "uneven"))
        buffers.append(receives)
    flights[1].wait()
    flights[0].wait()
    return [[] if buffer is None else buffer.tolist() for receives in buffers for buffer in receives]


def reductions(transport: Transport) -> dict[str, Tensor]:
    """Sums of floats whose order shows in the last bits, small and large, and the other operations."""
    generator = torch.Generator().manual_seed(transport.rank)
    small = torch.randn(7, 3, generator=generator)
    large = torch.randn(5, 8191, generator=generator) * 10.0 ** torch.randint(-6, 6, (5, 8191), generator=generator)
    kept = small.clone()
    results = {
        "small": transport.all_reduce(small, "small"),
        "large": transport.all_reduce(large, "large"),
        "double": transport.all_reduce(large.double(), "double"),
        "half": transport.all_reduce(large.bfloat16(), "half"),
        "max": transport.all_reduce(small, "max", "max"),
        "min": transport.all_reduce(large, "min", "min"),
        "scalar": transport.all_reduce(torch.tensor(transport.rank + 1), "scalar"),
        "empty": transport.all_reduce(torch.zeros(0, 4), "empty"),
        "any": transport.all_reduce(torch.tensor([transport.rank == 1, False]), "any", "max"),
        "strided": transport.all_reduce(small.t(), "strided"),
    }
    assert torch.equal(small, kept)
    return results


def objects(transport: Transport) -> list[object]:
    """Values of different sizes, then a barrier."""
    gathered = transport.all_gather_object({"rank": transport.rank, "text": "x" * 100 * transport.rank}, "objects")
    transport.barrier("end")
    return gathered


def counted(transport: Transport) -> tuple[int, int]:
    """(bytes, messages) of one exchange of 5 float32 with each peer."""
    before = transport.bytes_sent, transport.messages_sent
    sends = [torch.ones(5)] * transport.size
    transport.exchange(sends, [torch.empty(5) for _ in sends], "counted").wait()
    return transport.bytes_sent - before[0], transport.messages_sent - before[1]


def polled(transport: Transport) -> Tensor:
    """An exchange that is asked whether it is done until it is."""
    receives = [torch.zeros(4) for _ in range(transport.size)]
    flight = transport.exchange([torch.ones(4) * transport.rank] * transport.size, receives, "polled")
    while not flight.done():
        pass
    flight.wait(0.5)
    return torch.stack(receives)


class _Share(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor, transport: Transport) -> Tensor:
        ctx.transport = transport  # type: ignore[attr-defined]
        return transport.all_reduce(x, "forward")

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.transport.all_reduce(grad, "backward"), None  # type: ignore[attr-defined]


def autograd(transport: Transport) -> Tensor:
    """The gradient of a loss whose backward communicates: rank r adds (r + 1) * 2 * total, summed over ranks."""
    x = torch.tensor([1.0 + transport.rank], requires_grad=True)
    total = _Share.apply(x, transport)
    ((transport.rank + 1) * total**2).sum().backward()
    assert x.grad is not None
    return x.grad
