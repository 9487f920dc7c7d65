"""What a call gives does not depend on the calls before it: programs are found again only where they fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.options import Options
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

NODES, EDGES = 19, 50


def neighbours(h: Tensor, edges: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])


class Net(nn.Module):
    """Two layers behind an aggregation that depends on inputs alone, and is kept where they need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 32), nn.Linear(32, 32)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, edges: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        h = self.drop(self.one(neighbours(x * scale, edges)).relu())
        return self.two(neighbours(h, edges))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, NODES, (2, EDGES), generator=generator)


def both(script: Callable[..., Any], **options: Any) -> tuple[Any, list[Any]]:
    """What a script gives on the plain model, and on each of two ranks."""
    torch.manual_seed(0)
    model, cache = Net().double(), ProgramCache()
    expected = script(copy.deepcopy(model), *data())

    def rank(transport: Any) -> Any:
        net = DistributedModule(
            copy.deepcopy(model), Options(timeout=30, **options), default_passes(), transport, cache
        )
        found = script(net, *net.shard(*data(), partition="random"))
        return [t.full() if isinstance(t, NodeTensor) else t for t in found]

    return expected, run_ranks(2, rank, 30)


def same(script: Callable[..., Any], **options: Any) -> None:
    expected, ranks = both(script, **options)
    for found in ranks:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_an_input_that_learns_after_training_steps() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        for _ in range(2):
            net(x, edges).pow(2).sum().backward()
        x.requires_grad_()
        for _ in range(2):
            net(x, edges).pow(2).sum().backward()
        found = [x.grad.clone()]
        x.requires_grad_(False)
        net(x, edges).pow(2).sum().backward()
        return [*found, x.grad, *(p.grad for p in net.parameters())]

    same(script)


def test_an_input_that_learns_after_an_evaluation() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        net.eval()
        with torch.no_grad():
            net(x, edges)
        x.requires_grad_()
        with torch.no_grad():
            out = net(x, edges)
        return [out, *torch.autograd.grad(net(x, edges).logsumexp(1).sum(), x)]

    same(script)


def test_a_number_for_all_nodes_that_learns_later() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        scale = torch.tensor(2.0, dtype=torch.float64)
        net(x, edges, scale).sum().backward()
        scale.requires_grad_()
        for _ in range(2):
            net(x, edges, scale).pow(2).sum().backward()
        return [scale.grad]

    same(script)


def test_a_line_outside_the_model_whose_rows_learn_later() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        first = neighbours(x, edges)
        x.requires_grad_()
        neighbours(x, edges).pow(2).sum().backward()
        return [first, x.grad]

    same(script)
