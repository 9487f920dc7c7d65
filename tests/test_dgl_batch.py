"""A batch of DGL graphs is several graphs for readouts, and one for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx
import sylvie_fx.dgl
from sylvie_fx.ir.errors import CaptureError, PartitionError

dgl = pytest.importorskip("dgl")
import dgl.nn as dglnn  # noqa: E402

pytestmark = pytest.mark.dgl
WIDTH = 4


def graph(sizes: tuple[int, ...]) -> Any:
    torch.manual_seed(0)
    ends = [torch.randint(0, n, (2, 3 * n)) for n in sizes]
    batch = dgl.batch([dgl.graph((u, v), num_nodes=n) for n, (u, v) in zip(sizes, ends, strict=True)])
    batch.ndata["x"] = torch.randn(batch.num_nodes(), WIDTH, dtype=torch.float64)
    batch.edata["w"] = torch.rand(batch.num_edges(), 2, dtype=torch.float64)
    return batch


class Model(nn.Module):
    """Node rows, and what a function reads out of them."""

    def __init__(self, readout: Callable[[Any, Any, Tensor], Tensor], pool: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.readout = dglnn.GraphConv(WIDTH, WIDTH, allow_zero_in_degree=True), readout
        self.pool, self.gate = pool, nn.Linear(WIDTH, 1)

    def forward(self, g: Any) -> Tensor:
        return self.readout(self, g, self.conv(g, g.ndata["x"]).tanh())


def of_nodes(function: Callable[[Any, str], Tensor]) -> Callable[[Any, Any, Tensor], Tensor]:
    def readout(m: Any, g: Any, h: Tensor) -> Tensor:
        with g.local_scope():
            g.ndata["h"] = h
            return function(g, "h")

    return readout


def centred(m: Any, g: Any, h: Tensor) -> Tensor:
    with g.local_scope():
        g.ndata["h"] = h
        return h - dgl.broadcast_nodes(g, dgl.mean_nodes(g, "h"))


def of_edges(m: Any, g: Any, h: Tensor) -> Tensor:
    with g.local_scope():
        g.ndata["h"] = h
        g.apply_edges(dgl.function.u_dot_v("h", "h", "e"))
        g.edata["share"] = dgl.softmax_edges(g, "e") * g.edata["w"]
        total = dgl.sum_edges(g, "share")
        return (dgl.broadcast_edges(g, total) - g.edata["share"]).sum(1, keepdim=True) * g.edata["e"]


def after_removal(m: Any, g: Any, h: Tensor) -> Tensor:
    g = g.local_var()
    g.remove_edges(torch.tensor([0, 1, 5]))
    return dgl.sum_edges(g, "w") * g.batch_size


def reversed_is_one(m: Any, g: Any, h: Tensor) -> Tensor:
    turned = dgl.reverse(g)
    turned.ndata["h"] = h
    return dgl.mean_nodes(turned, "h")


POOL = lambda m, g, h: m.pool(g, h)  # noqa: E731
READOUTS: dict[str, Callable[[], Model]] = {
    "mean": lambda: Model(of_nodes(dgl.mean_nodes)),
    "max": lambda: Model(of_nodes(dgl.max_nodes)),
    "weighted": lambda: Model(lambda m, g, h: of_nodes(lambda g, n: dgl.sum_nodes(g, n, "x"))(m, g, h)),
    "softmax": lambda: Model(of_nodes(dgl.softmax_nodes)),
    "broadcast": lambda: Model(centred),
    "edges": lambda: Model(of_edges),
    "removed edges": lambda: Model(after_removal),
    "reversed": lambda: Model(reversed_is_one),
    "SumPooling": lambda: Model(POOL, dglnn.SumPooling()),
    "AvgPooling": lambda: Model(POOL, dglnn.AvgPooling()),
    "MaxPooling": lambda: Model(POOL, dglnn.MaxPooling()),
    "GlobalAttentionPooling": lambda: Model(POOL, dglnn.GlobalAttentionPooling(nn.Linear(WIDTH, 1))),
    "Set2Set": lambda: Model(POOL, dglnn.Set2Set(WIDTH, 2, 1)),
}


@pytest.mark.parametrize("sizes", [(5, 8, 6), (7,)], ids=["three", "one"])
@pytest.mark.parametrize("name", READOUTS)
def test_readouts_are_exact(name: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    report = sylvie_fx.verify(READOUTS[name]().double(), graph(sizes), parts=3, partition="random", timeout=60)
    assert report.refused is None, report.refused
    assert report.exact, str(report)


def test_the_same_model_reads_batches_of_several_sizes() -> None:
    model = Model(of_nodes(dgl.mean_nodes)).double()
    distributed = sylvie_fx.distribute(model)
    for sizes in ((5, 8, 6), (9,), (3, 4), (6, 8, 5)):
        batch = graph(sizes)
        own = distributed.shard(batch)
        assert own.batch_size == len(sizes)
        assert own.batch_num_nodes().tolist() == list(sizes)
        assert own.batch_num_edges().tolist() == [3 * n for n in sizes]
        torch.testing.assert_close(distributed(own), model(batch))


def test_sizes_as_a_tensor_are_refused() -> None:
    model = Model(lambda m, g, h: h.sum() / g.batch_num_nodes().float().mean()).double()
    distributed = sylvie_fx.distribute(model)
    with pytest.raises(CaptureError, match=r"test_dgl_batch.py:\d+.*sizes of the graphs of a batch.*\(float\)"):
        distributed(distributed.shard(graph((3, 4))))


def test_a_batch_by_its_nodes_alone_is_refused() -> None:
    single = graph((6,))
    single.set_batch_num_nodes(torch.tensor([2, 4]))
    with pytest.raises(
        PartitionError, match=r"batch of 2 graphs by its nodes and of 1 by its edges.*set_batch_num_edges"
    ):
        sylvie_fx.distribute(Model(centred)).shard(single)
