"""Models in bfloat16 and float64 run distributed in their own type, as exactly as that type allows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport

NODES = 50
GENERATOR = torch.Generator().manual_seed(0)
X, EDGES = torch.randn(NODES, 6, generator=GENERATOR), torch.randint(NODES, (2, 300), generator=GENERATOR)


class Net(nn.Module):
    """A weighted sum, dropout-free attention and a maximum of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)
        self.a, self.b = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.first(x)
        h = torch.zeros_like(h).index_add(0, target, h[source])
        e = F.leaky_relu((h @ self.a)[source] + (h @ self.b)[target], 0.2)
        power = (e - e.new_zeros(h.shape[0]).scatter_reduce(0, target, e.detach(), "amax")[target]).exp()
        alpha = power / power.new_zeros(h.shape[0]).index_add(0, target, power)[target]
        h = torch.zeros_like(h).index_add(0, target, h[source] * alpha.unsqueeze(1))
        index = target.unsqueeze(1).expand(-1, 8)
        h = torch.zeros_like(h).scatter_reduce(0, index, torch.relu(h)[source], "amax", include_self=False)
        return self.second(h)


def results(dtype: torch.dtype, ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, cache = Net().to(dtype), ProgramCache()

    def run(transport: Transport) -> list[Tensor]:
        own = copy.deepcopy(model)
        net = sylvie_fx.DistributedModule(
            own, sylvie_fx.Options(timeout=20.0), sylvie_fx.default_passes(), transport, cache
        )
        x, edges = net.shard(X.to(dtype), EDGES, partition="random")
        out = net(x, edges)
        out.square().mean().backward()
        return [out.full().detach(), *(p.grad for p in own.parameters())]

    return run_ranks(ranks, run, 60.0)[0]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_are_kept(dtype: torch.dtype, ranks: int) -> None:
    found = results(dtype, ranks)
    assert all(t.dtype == dtype for t in found)
    torch.manual_seed(0)
    exact = Net().to(dtype).double()  # the same weights, computed without rounding
    out = exact(X.to(dtype).double(), EDGES)
    out.square().mean().backward()
    for one, wanted in zip(found, [out.detach(), *(p.grad for p in exact.parameters())], strict=True):
        error = (one.double() - wanted).norm() / wanted.norm()
        assert error < (0.05 if dtype == torch.bfloat16 else 1e-12)
