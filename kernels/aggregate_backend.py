"""Which implementation of the aggregations serves which tensors."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sylvie_fx.kernels import aggregate_cpu, aggregate_library, aggregate_reference
from sylvie_fx.kernels.aggregate_layout import Rows
from sylvie_fx.kernels.aggregate_reference import Combination
from sylvie_fx.kernels.dropout import Drop


class Backend(Protocol):
    """What an implementation offers; :mod:`sylvie_fx.kernels.aggregate_reference` specifies each function."""

    def sum_rows(self, rows: Rows, x: Tensor, weight: Tensor | None, divisors: Tensor | None) -> Tensor:
        """Sums of neighbours."""

    def continue_sum(
        self, rows: Rows, targets: Tensor, x: Tensor, weight: Tensor | None, divisors: Tensor | None, out: Tensor
    ) -> None:
        """Adds more neighbours to sums."""

    def extreme_rows(
        self, rows: Rows, x: Tensor, weight: Tensor | None, smallest: bool, count: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Largest or smallest messages, and how many are equal to them."""

    def continue_extreme(
        self,
        rows: Rows,
        targets: Tensor,
        before: Tensor,
        x: Tensor,
        weight: Tensor | None,
        smallest: bool,
        out: Tensor,
        ties: Tensor | None,
    ) -> None:
        """Lets more messages compete with the extremes."""

    def ties_rows(self, rows: Rows, x: Tensor, weight: Tensor | None, extreme: Tensor, share: Tensor) -> Tensor:
        """The gradient of ``x`` through ``extreme_rows``."""

    def dot_edges(self, rows: Rows, u: Tensor, v: Tensor) -> Tensor:
        """Products of the rows at the two ends of each edge."""

    def tie_dot_edges(self, rows: Rows, u: Tensor, v: Tensor, weight: Tensor, extreme: Tensor) -> Tensor:
        """Products of those values that are extreme."""

    def combine_edges(self, rows: Rows, u: Tensor, v: Tensor, op: Combination) -> Tensor:
        """Sums, differences or products of the values at the two ends of each edge."""

    def softmax_edges(self, rows: Rows, e: Tensor) -> Tensor:
        """Softmax over the edges of each row."""

    def softmax_gradient(self, rows: Rows, y: Tensor, gradient: Tensor) -> Tensor:
        """The gradient through ``softmax_edges``."""

    def attention(
        self,
        rows: Rows,
        x: Tensor,
        source_score: Tensor,
        target_score: Tensor,
        negative_slope: float,
        drop: Drop | None,
    ) -> tuple[Tensor, Tensor]:
        """Softmax-weighted sums of neighbours, and the softmax."""

    def attention_gradient(
        self,
        rows: Rows,
        x: Tensor,
        source_score: Tensor,
        target_score: Tensor,
        negative_slope: float,
        drop: Drop | None,
        alpha: Tensor,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What stands at edges to be summed by source, and the gradient of the destinations' scores."""

    def attention_sources(
        self, rows: Rows, places: Tensor | None, edge_values: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of ``x`` and of the sources' scores through ``attention``."""

    def scores(self, rows: Rows, x: Tensor, own: Tensor, vector: Tensor, negative_slope: float) -> Tensor:
        """Products of a vector with the leaky ReLU of the sum of an edge's two ends."""

    def scores_gradient(
        self,
        rows: Rows,
        x: Tensor,
        own: Tensor,
        vector: Tensor,
        negative_slope: float,
        gradient: Tensor,
        of_vector: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of ``own`` and ``vector`` through ``scores``."""


def backend_for(rows: Rows, x: Tensor) -> Backend:
    """The C++ kernels for float32 and float64 in host memory below 2^31 edges and rows, else the torch reference."""
    native = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and rows.narrow
    return aggregate_cpu if native and aggregate_library.available() else aggregate_reference


def kernel_name(dtype: torch.dtype, device: torch.device) -> str:
    """What an aggregation of values of a type runs on, for people to read."""
    computed = as_computed(dtype)
    if device.type != "cpu" or computed not in (torch.float32, torch.float64) or not aggregate_library.available():
        return "torch"
    through = "" if computed == dtype else f" in {str(computed).removeprefix('torch.')}"
    return f"C++ {aggregate_library.instruction_set()}{through}"


def as_computed(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are taken in: 16-bit floats in float32, the others as they are."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
