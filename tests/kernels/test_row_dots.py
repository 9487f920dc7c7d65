"""Products of rows with vectors: the compiled kernel against the operator that specifies it, and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from sylvie_fx.ir import ops
from sylvie_fx.kernels.row_dots import row_dots

compiled = pytest.mark.usefixtures("compiled_kernels")
SHAPES = ((1000, 4, 16, 2), (7, 1, 3, 1), (300, 3, 37, 3), (5, 8, 64, 2), (0, 2, 4, 2), (5, 2, 0, 1))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, int, int, int], threads: int) -> None:
    """Of sums of up to 1000 normal products, whose rounding is below 1000 * 2**-24 * 4 in float32."""
    rows, heads, dim, count = shape
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.randn(rows, heads, dim, dtype=dtype, requires_grad=True)
        vectors = [torch.randn(1, heads, dim, dtype=dtype, requires_grad=True) for _ in range(count)]
        gradient = torch.randn(count, rows, heads, dtype=dtype)
        results = [row_dots(x, vectors), ops.row_dots(x, vectors)]
        gradients = [torch.autograd.grad(result, [x, *vectors], gradient) for result in results]
    finally:
        torch.set_num_threads(before)
    tolerance = 2.4e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(*results, rtol=1e-5, atol=tolerance)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=tolerance)


@compiled
def test_each_gradient_alone() -> None:
    x, vector = torch.randn(6, 2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    for x_learns, vector_learns in ((True, False), (False, True), (True, True)):
        operands = (x.clone().requires_grad_(x_learns), vector.clone().requires_grad_(vector_learns))
        assert gradcheck(lambda rows, v: row_dots(rows, [v, v]), operands)


def test_another_dtype_goes_through_the_operator() -> None:
    x, vector = torch.randn(6, 2, 5, dtype=torch.bfloat16), torch.randn(1, 2, 5, dtype=torch.bfloat16)
    assert torch.equal(row_dots(x, [vector]), ops.row_dots(x, [vector]))
