"""Values that depend on inputs alone cross once, and again on every rank when an input of any rank has changed."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.graphs.partition import partition_nodes
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport


class Mean(nn.Module):
    """A sum of the inputs over neighbours, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))


def test_an_input_that_one_rank_changes_crosses_again_on_all() -> None:
    generator = torch.Generator().manual_seed(0)
    x, edges = torch.randn(30, 6, generator=generator), torch.randint(30, (2, 120), generator=generator)
    model, cache = Mean(), ProgramCache()

    def run(transport: Transport) -> tuple[list[int], Tensor]:
        net = sylvie_fx.DistributedModule(
            copy.deepcopy(model), sylvie_fx.Options(timeout=20.0), sylvie_fx.default_passes(), transport, cache
        )
        own, index = net.shard(x, edges, partition="random")
        sent = []
        for step in range(4):
            if step == 2 and transport.rank == 1:
                own.local().mul_(2.0)
            before = transport.bytes_sent
            out = net(own, index)
            sent.append(transport.bytes_sent - before)
        return sent, out.full()

    results = run_ranks(3, run, 60.0)
    for sent, _ in results:
        assert sent[1] < sent[0]
        assert sent[2] == sent[0]
        assert sent[3] == sent[1]
    net = sylvie_fx.distribute(copy.deepcopy(model))
    changed = x.clone()
    parts = partition_nodes(30, edges[0], edges[1], 3, "random", 0)
    changed[parts == 1] *= 2.0
    expected = net(*net.shard(changed, edges)).full()
    torch.testing.assert_close(results[0][1], expected, rtol=1e-5, atol=1e-5)
