"""Scores of edges: the compiled kernels agree with the reference, and with the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sylvie_fx.ir.errors import KernelError
from sylvie_fx.kernels import aggregate_cpu as cpu
from sylvie_fx.kernels import aggregate_library
from sylvie_fx.kernels import aggregate_reference as reference
from sylvie_fx.kernels.aggregate import EdgeLayout
from sylvie_fx.kernels.edge_scores import edge_scores

compiled = pytest.mark.usefixtures("compiled_kernels")
WIDTHS = [(1, 1), (1, 7), (4, 16), (4, 8), (3, 5), (2, 150), (8, 1), (1, 16), (6, 32), (0, 3), (2, 0)]


def operands(heads: int, dim: int, dtype: torch.dtype, edges: int = 300) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads * 100 + dim)

    def values(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    src = torch.randint(40, (edges,), generator=generator)
    dst = torch.randint(30, (edges,), generator=generator)
    dst[::3] = 0  # a hub
    return {
        "layout": EdgeLayout(src, dst, 40, 35), "u": values(40, heads, dim), "v": values(35, heads, dim),
        "vector": values(heads, dim), "gradient": values(edges, heads),
    }  # fmt: skip


def formula(layout: EdgeLayout, u: Tensor, v: Tensor, vector: Tensor, slope: float) -> Tensor:
    return (vector * torch.nn.functional.leaky_relu(u[layout.src] + v[layout.dst], slope)).sum(-1)


@compiled
@pytest.mark.parametrize("isa", aggregate_library.ISA_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "dim"), WIDTHS)
def test_agrees_with_the_reference(heads: int, dim: int, dtype: torch.dtype, isa: int) -> None:
    near = {"rtol": 3e-5, "atol": 3e-5} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-12}
    given = operands(heads, dim, dtype)
    vector, gradient = given["vector"], given["gradient"]
    for rows, x, own in (
        (given["layout"].by_destination, given["u"], given["v"]),
        (given["layout"].by_source, given["v"], given["u"]),
    ):
        torch.testing.assert_close(
            cpu.scores(rows, x, own, vector, 0.2, isa=isa), reference.scores(rows, x, own, vector, 0.2), **near
        )
        for wanted in (True, False):
            found = cpu.scores_gradient(rows, x, own, vector, 0.2, gradient, wanted, isa=isa)
            expected = reference.scores_gradient(rows, x, own, vector, 0.2, gradient, wanted)
            torch.testing.assert_close(found[0], expected[0], **near)
            assert (found[1] is None) == (expected[1] is None) == (not wanted)
            if found[1] is not None:
                torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_gradients_are_those_of_the_formula(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_PIECE", 40)
    if backend == "torch":
        monkeypatch.setattr(aggregate_library, "available", lambda: False)
    given = operands(2, 3, torch.float64)
    leaves = [given[name].requires_grad_() for name in ("u", "v", "vector")]
    found, wanted = edge_scores(given["layout"], *leaves, 0.3), formula(given["layout"], *leaves, 0.3)
    torch.testing.assert_close(found, wanted)
    up = given["gradient"]
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, up, retain_graph=True), torch.autograd.grad(wanted, leaves, up)
    )
    only = edge_scores(given["layout"], leaves[0].detach(), leaves[1], leaves[2].detach(), 0.3)
    assert torch.equal(torch.autograd.grad(only, leaves[1], up)[0], torch.autograd.grad(found, leaves[1], up)[0])


def test_a_graph_without_edges() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    u, v, vector = (torch.randn(*size, requires_grad=True) for size in ((3, 2, 4), (5, 2, 4), (2, 4)))
    out = edge_scores(EdgeLayout(empty, empty, 3, 5), u, v, vector, 0.2)
    assert out.shape == (0, 2)
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), (u, v, vector)))


def test_halves_are_computed_in_float32_and_others_as_they_are() -> None:
    given = operands(2, 8, torch.bfloat16)
    out = edge_scores(given["layout"], given["u"], given["v"], given["vector"], 0.2)
    assert out.dtype == torch.bfloat16
    wide = formula(given["layout"], *(given[n].float() for n in ("u", "v", "vector")), 0.2)
    torch.testing.assert_close(out, wide.to(torch.bfloat16), rtol=2**-7, atol=1e-4)
    with pytest.raises(KernelError, match="scores need"):
        edge_scores(given["layout"], given["v"], given["u"], given["vector"], 0.2)
