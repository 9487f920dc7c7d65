"""Gradients against finite differences, gradients of gradients, and what a forward pass keeps for its backward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from sylvie_fx.kernels.aggregate import Drop, EdgeLayout, attention, sddmm, segment_reduce, segment_softmax, spmm

SRC, DST = torch.tensor([0, 1, 1, 4, 2, 0, 3, 3, 1]), torch.tensor([2, 0, 0, 2, 1, 2, 3, 0, 2])
LAYOUT = EdgeLayout(SRC, DST, 5, 5)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


CALLS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "sum": (lambda x: spmm(LAYOUT, x), (leaf(5, 3),)),
    "mean": (lambda x, w: spmm(LAYOUT, x, w, "mean"), (leaf(5, 3), leaf(9))),
    "heads": (lambda x, w: spmm(LAYOUT, x, w), (leaf(5, 2, 4), leaf(9, 2))),
    "values": (lambda x, w: spmm(LAYOUT, x, w), (leaf(5, 6), leaf(9, 6))),
    "segment": (lambda e: segment_reduce(LAYOUT, e), (leaf(9, 2),)),
    "add": (lambda u, v: sddmm(LAYOUT, u, v, "add"), (leaf(5, 2), leaf(5, 2, seed=1))),
    "sub": (lambda u, v: sddmm(LAYOUT, u, v, "sub"), (leaf(5, 2), leaf(5, 2, seed=1))),
    "mul": (lambda u, v: sddmm(LAYOUT, u, v, "mul"), (leaf(5, 2), leaf(5, 2, seed=1))),
    "dot": (lambda u, v: sddmm(LAYOUT, u, v, "dot"), (leaf(5, 2, 3), leaf(5, 2, 3, seed=1))),
}
ONCE: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "max": (lambda x: spmm(LAYOUT, x, None, "max"), (leaf(5, 3),)),
    "min": (lambda x, w: spmm(LAYOUT, x, w, "min"), (leaf(5, 2, 3), leaf(9, 2))),
    "softmax": (lambda e: segment_softmax(LAYOUT, e), (leaf(9, 3),)),
    "attention": (
        lambda x, s, t: attention(LAYOUT, x, s, t, 0.2, Drop(torch.arange(9), 0.3, 1)),
        (leaf(5, 2, 3), leaf(5, 2), leaf(5, 2, seed=1)),
    ),
}


@pytest.mark.parametrize("name", [*CALLS, *ONCE])
def test_gradients(name: str) -> None:
    call, leaves = (CALLS | ONCE)[name]
    assert gradcheck(call, leaves, nondet_tol=0.0)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_gradients(name: str) -> None:
    call, leaves = CALLS[name]
    assert gradgradcheck(call, leaves)


@pytest.mark.parametrize("name", ["max", "softmax", "attention"])
def test_what_has_no_second_gradient_says_so(name: str) -> None:
    call, leaves = ONCE[name]
    (first,) = torch.autograd.grad(call(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["mean", "heads", "max", "attention"])
def test_only_some_operands_ask_for_a_gradient(name: str) -> None:
    call, leaves = (CALLS | ONCE)[name]
    for chosen in range(len(leaves)):
        fixed = [one if i == chosen else one.detach() for i, one in enumerate(leaves)]
        wanted = torch.autograd.grad(call(*leaves).sum(), leaves)[chosen]
        assert torch.equal(torch.autograd.grad(call(*fixed).sum(), [leaves[chosen]])[0], wanted)


def _kept(call: Callable[[], Tensor]) -> int:
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    return sum(sizes.values())


def test_nothing_of_edges_times_values_is_kept() -> None:
    edges, nodes, width = 5000, 50, 64
    layout = EdgeLayout(torch.randint(nodes, (edges,)), torch.randint(nodes, (edges,)), nodes, nodes)
    x, weight, score = (torch.randn(*size, requires_grad=True) for size in ((nodes, 2, width), (edges, 2), (nodes, 2)))
    rows = nodes * 2 * width
    assert _kept(lambda: spmm(layout, x)) == 0
    assert _kept(lambda: spmm(layout, x, weight.detach())) <= edges * 2
    assert _kept(lambda: spmm(layout, x, weight)) <= rows + edges * 2
    assert _kept(lambda: spmm(layout, x, None, "max")) <= 3 * rows
    assert _kept(lambda: attention(layout, x, score, score)) <= rows + 2 * nodes * 2 + edges * 2
