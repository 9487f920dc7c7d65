"""With recompute=True gradients stay, and what is made between aggregations is not kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir import ops
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.recompute import Stretch, stretches
from sylvie_fx.runtime.transport import Transport

NODES = 60
GENERATOR = torch.Generator().manual_seed(0)
X, EDGES = torch.randn(NODES, 6, generator=GENERATOR), torch.randint(NODES, (2, 400), generator=GENERATOR)
Y = torch.randint(3, (NODES,), generator=GENERATOR)


class Attention(nn.Module):
    """Two layers of attention with dropout of weights and rows, and batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scores = nn.ParameterList([torch.randn(8), torch.randn(8), torch.randn(3), torch.randn(3)])
        self.norm = nn.BatchNorm1d(8)

    def attend(self, h: Tensor, edges: Tensor, a: Tensor, b: Tensor) -> Tensor:
        source, target = edges
        e = F.leaky_relu((h @ a)[source] + (h @ b)[target], 0.2)
        largest = e.new_zeros(h.shape[0]).scatter_reduce(0, target, e.detach(), "amax", include_self=False)
        power = (e - largest[target]).exp()
        alpha = power / power.new_zeros(h.shape[0]).index_add(0, target, power)[target]
        alpha = F.dropout(alpha, 0.3, self.training)
        return torch.zeros_like(h).index_add(0, target, h[source] * alpha.unsqueeze(1))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        a, b, c, d = self.scores
        h = self.norm(self.attend(self.first(x), edges, a, b))
        return self.attend(self.second(F.dropout(F.relu(h), 0.5, self.training)), edges, c, d)


def gradients(ranks: int, recompute: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model, cache = Attention(), ProgramCache()

    def run(transport: Transport) -> list[Tensor]:
        options = sylvie_fx.Options(recompute=recompute, timeout=20.0)
        own = copy.deepcopy(model)
        net = sylvie_fx.DistributedModule(own, options, sylvie_fx.default_passes(), transport, cache)
        x, edges, y = net.shard(X, EDGES, Y, partition="random")
        losses = [F.cross_entropy(net(x, edges), y) for _ in range(2)]
        sum(losses).backward()  # the first step's masks are drawn again after the second step has begun
        return [*(p.grad for p in own.parameters()), *(b.clone() for b in own.buffers())]

    return run_ranks(ranks, run, 60.0)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_gradients_are_the_same(ranks: int) -> None:
    for found, wanted in zip(gradients(ranks, True), gradients(ranks, False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def kept(recompute: bool) -> int:
    """Numbers that a step's operators save for the backward pass, parameters and inputs aside."""
    net = sylvie_fx.distribute(Attention(), recompute=recompute)
    x, edges = net.shard(X, EDGES)
    net(x, edges)
    outer = {t.untyped_storage().data_ptr() for t in (*net.parameters(), x.local())}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outer and tensor.is_floating_point():
            sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = net(x, edges)
    assert out.requires_grad
    return sum(sizes.values())


def test_less_is_kept() -> None:
    assert kept(True) < 0.7 * kept(False)


def test_a_stretch_ends_with_its_aggregation() -> None:
    net = sylvie_fx.distribute(Attention(), recompute=True)
    net(*net.shard(X, EDGES))
    found = [s for s in stretches(list(net.program().graph.nodes)) if isinstance(s, Stretch)]
    assert [s.nodes[-1].target for s in found].count(ops.attention) == 2
    assert all(n.target is not ops.attention for s in found for n in s.nodes[:-1])
    assert all(n.target not in ops.CROSSING for s in found for n in s.nodes)
