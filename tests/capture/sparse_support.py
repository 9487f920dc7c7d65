"""Models on a sparse adjacency, captured with N and E as symbols, against torch on another graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from sylvie_fx.capture.sparse import (
    adjacency_parts,
    patched_sparse,
    stand_in_adjacency,
)

Model = Callable[..., Any]
COO, CSR, CSC = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc
LAYOUTS = pytest.mark.parametrize("layout", [COO, CSR], ids=["coo", "csr"])


def edges(nodes: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random graph with a hub (0), self loops, parallel edges and an isolated last node; unsorted."""
    random = torch.Generator().manual_seed(seed)
    row, col = torch.randint(0, nodes - 1, (2, 4 * nodes), generator=random)
    hub = torch.arange(1, nodes - 1)
    row = torch.cat([row, torch.zeros_like(hub), torch.tensor([2, 3, 3])])
    col = torch.cat([col, hub, torch.tensor([2, 1, 1])])
    return row, col


def adjacency(nodes: int, layout: torch.layout, seed: int, coalesced: bool = True) -> Tensor:
    row, col = edges(nodes, seed)
    value = torch.rand(row.numel(), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
    adj = torch.sparse_coo_tensor(torch.stack([row, col]), value, (nodes, nodes))
    if layout is COO and not coalesced:
        return adj
    return {COO: adj.coalesce, CSR: adj.to_sparse_csr, CSC: adj.to_sparse_csc}[layout]()


class Wrapper(nn.Module):
    """Builds the stand-in from plain inputs, as the capture does."""

    def __init__(self, model: Model, layout: torch.layout, coalesced: bool) -> None:
        super().__init__()
        self.model, self.layout, self.coalesced = model, layout, coalesced

    def forward(self, x: Tensor, row: Tensor, col: Tensor, value: Tensor | None, marker: Tensor) -> Any:
        with patched_sparse():
            adj = stand_in_adjacency(row, col, value, marker.shape[0], self.layout, self.coalesced)
            return self.model(x, adj)


def features(nodes: int) -> Tensor:
    return torch.randn(nodes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(nodes))


def captured(model: Model, adj: Tensor, implicit: bool = False) -> ExportedProgram:
    parts = adjacency_parts(adj)
    n, e = Dim("N", min=8, max=2**31), Dim("E", min=8, max=2**40)
    value = None if implicit else parts.value.clone().requires_grad_(parts.value.is_floating_point())
    marker = torch.ones(parts.num_nodes, dtype=torch.bool)
    return export(
        Wrapper(model, parts.layout, parts.coalesced),
        (features(parts.num_nodes), parts.row, parts.col, value, marker),
        dynamic_shapes=({0: n}, {0: e}, {0: e}, None if implicit else {0: e}, {0: n}),
        strict=False,
    )


def real(parts: Any, value: Tensor) -> Tensor:
    size = (parts.num_nodes, parts.num_nodes)
    if parts.layout is COO:
        pair = torch.stack([parts.row, parts.col])
        return torch.sparse_coo_tensor(pair, value, size, is_coalesced=parts.coalesced or None)
    coo = torch.sparse_coo_tensor(torch.stack([parts.row, parts.col]), value, size)
    return coo.to_sparse_csr() if parts.layout is CSR else coo.to_sparse_csc()


def check(model: Model, layout: torch.layout, coalesced: bool = True, gradient: bool = True) -> ExportedProgram:
    """Capture on 20 nodes, run on 33, compare results and gradients of features and values with torch."""
    program = captured(model, adjacency(20, layout, 0, coalesced))
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in ("x", "row", "col", "value", "marker"):
            assert isinstance(node.meta["val"].shape[0], torch.SymInt)
        assert "sparse" not in str(node.target), node
    parts = adjacency_parts(adjacency(33, layout, 1, coalesced))
    if not gradient:
        check_gradients(program, layout, coalesced)
    results, gradients = [], []
    for run in ("captured", "torch"):
        x = features(33).requires_grad_(gradient)
        value = parts.value.clone().requires_grad_(gradient)
        if run == "captured":
            result = program.module()(x, parts.row, parts.col, value, torch.ones(33, dtype=torch.bool))
        else:
            result = model(x, real(parts, value))
            result = result.to_dense() if result.layout is not torch.strided else result
        results.append(result.detach())
        if gradient:
            weight = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
            inputs = [t for t in (x, value) if t.requires_grad]
            gradients.append(torch.autograd.grad((result * weight).sum(), inputs, allow_unused=True))
    torch.testing.assert_close(results[0], results[1])
    for mine, theirs in zip(*gradients, strict=True) if gradient else ():
        torch.testing.assert_close(mine, theirs)
    return program


def check_gradients(program: ExportedProgram, layout: torch.layout, coalesced: bool) -> None:
    """Compare with finite differences, for what torch itself has no gradient of."""
    parts = adjacency_parts(adjacency(8, layout, 2, coalesced))
    marker = torch.ones(8, dtype=torch.bool)

    def run(x: Tensor, value: Tensor) -> Tensor:
        result: Tensor = program.module()(x, parts.row, parts.col, value, marker)
        return result

    inputs = (features(8).requires_grad_(), parts.value.clone().requires_grad_())
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
