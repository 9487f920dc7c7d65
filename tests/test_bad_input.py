"""Input that is wrong or extreme gives one clear error, or a defined result."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import sylvie_fx
from small_net import KINDS, Net, data, on_ranks
from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import CaptureError, PartitionError, SylvieError
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks


def losses(parts: int, x: Tensor, edge_index: Tensor, y: Tensor, mask: Tensor, partition: Any = None) -> list[float]:
    def run(model: Any) -> float:
        own_x, own_edges, own_y, own_mask = model.shard(x, edge_index, y, mask, partition=partition, kinds=KINDS)
        loss = F.cross_entropy(model(own_x, own_edges)[own_mask], own_y[own_mask])
        loss.backward()
        gradients = [p.grad.norm() for p in model.parameters()]
        return float(loss.detach()) + float(sum(gradients))

    return on_ranks(parts, run)


def expected_loss(x: Tensor, edge_index: Tensor, y: Tensor, mask: Tensor) -> float:
    torch.manual_seed(0)
    model = Net()
    loss = F.cross_entropy(model(x, edge_index.long())[mask], y[mask])
    loss.backward()
    return float(loss.detach()) + float(sum(p.grad.norm() for p in model.parameters()))  # type: ignore[union-attr]


# --- defined results ---------------------------------------------------------------------------------------------------


def no_edges() -> list[Tensor]:
    x, edge_index, y, mask = data()
    return [x, edge_index[:, :0], y, mask]


def isolated() -> list[Tensor]:
    x, edge_index, y, mask = data()
    return [x, edge_index % 5, y, mask]


def int32() -> list[Tensor]:
    x, edge_index, y, mask = data()
    return [x, edge_index.int(), y, mask]


def one_train_node() -> list[Tensor]:
    x, edge_index, y, mask = data()
    return [x, edge_index, y, torch.arange(len(mask)) == 0]  # the other parts have none


@pytest.mark.parametrize("make", [no_edges, isolated, int32, one_train_node])
@pytest.mark.parametrize("parts", [1, 3])
def test_extreme_graphs_equal_one_device(make: Callable[[], list[Tensor]], parts: int) -> None:
    assert losses(parts, *make(), partition="random") == pytest.approx([expected_loss(*make())] * parts, rel=1e-5)


def test_one_node() -> None:
    x, _, y, _ = data(1, 0)
    given = [x, torch.zeros(2, 1, dtype=torch.int64), y, torch.ones(1, dtype=torch.bool)]
    assert losses(1, *given) == pytest.approx([expected_loss(*given)], rel=1e-5)


def test_no_train_node_is_nan_everywhere() -> None:
    x, edge_index, y, mask = data()
    assert all(value != value for value in losses(2, x, edge_index, y, torch.zeros_like(mask)))


def test_nan_features_and_targets_stay_nan_on_every_rank() -> None:
    x, edge_index, _, _ = data()
    target = torch.full((len(x), 3), float("nan"))

    def run(model: Any) -> Tensor:
        own_x, own_edges, own_target = model.shard(x, edge_index, target)
        return F.mse_loss(model(own_x, own_edges), own_target).detach()

    assert all(value.isnan() for value in on_ranks(2, run))


def test_model_without_aggregation() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x)

    x, _, y, mask = data()
    model = Flat()

    def run(net: Any) -> list[Tensor]:
        own_x, own_y, own_mask = net.shard(x, y, mask)
        F.cross_entropy(net(own_x)[own_mask], own_y[own_mask]).backward()
        return [p.grad for p in net.parameters()]

    F.cross_entropy(model(x)[mask], y[mask]).backward()
    for found in on_ranks(3, run, model):
        torch.testing.assert_close(found, [p.grad for p in model.parameters()])


def test_nothing_to_learn() -> None:
    model = Net().requires_grad_(False)

    def run(net: Any) -> tuple[bool, Tensor]:
        own_x, own_edges, *_ = net.shard(*data())
        out = net(own_x, own_edges)
        return bool(out.requires_grad), out.full()

    for learns, out in on_ranks(2, run, model):
        assert not learns
        torch.testing.assert_close(out, model(*data()[:2]))


# --- one clear error ---------------------------------------------------------------------------------------------------


def changed(at: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    given = data()
    given[at] = change(given[at])
    return given


def out_of_range(edge_index: Tensor) -> Tensor:
    edge_index[0, 3] = 12
    return edge_index


def negative(edge_index: Tensor) -> Tensor:
    edge_index[1, 5] = -1
    return edge_index


@pytest.mark.parametrize(("parts", "given", "message"), [
    (1, lambda: [torch.zeros(0, 4), torch.zeros(2, 0, dtype=torch.int64), *data()[2:]], "the graph has no nodes"),
    (3, lambda: data(2, 3), "the graph has 2 nodes and can not be split into 3 parts"),
    (2, lambda: changed(1, out_of_range), "edge 3 has source 12, outside the 12 nodes"),
    (2, lambda: changed(1, negative), "edge 5 has destination -1"),
    (2, lambda: changed(1, lambda e: e.float()), "dtype torch.float32"),
    (2, lambda: changed(2, lambda y: y[:-1]), r"data\[2\] has shape \(11,\), but the graph has 12 nodes"),
    (2, lambda: changed(0, lambda x: x.to("meta")), "is on meta, but the model is on cpu"),
])  # fmt: skip
def test_malformed_data_is_refused_in_shard(parts: int, given: Callable[[], list[Tensor]], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        on_ranks(parts, lambda model: model.shard(*given(), kinds=KINDS))


def test_features_with_the_wrong_number_of_rows() -> None:
    x, edge_index, y, mask = data()
    with pytest.raises(PartitionError, match="11 rows, but the graph has 12 nodes and 40 edges"):
        on_ranks(2, lambda model: model.shard(x[:-1], edge_index, y, mask))


def test_as_many_nodes_as_edges() -> None:
    with pytest.raises(PartitionError, match=r"as many nodes as edges.*kinds="):
        on_ranks(1, lambda model: model.shard(*data(12, 12)))


def test_one_node_and_several_ranks() -> None:
    x, edge_index, y, mask = data(1, 2)
    with pytest.raises(PartitionError, match="the graph has 1 nodes and can not be split into 2 parts"):
        losses(2, x, edge_index, y, mask)


def test_unsharded_input_says_what_to_call() -> None:
    model = sylvie_fx.distribute(Net())
    x, edge_index, y, mask = data()
    with pytest.raises(CaptureError, match=r"not sharded.*model\.shard"):
        model(x, edge_index)
    own_x, own_edges, *_ = model.shard(x, edge_index, y, mask)
    with pytest.raises(CaptureError, match=r"a row for each of the 12 nodes, but it is not sharded.*model\.shard"):
        model(x, own_edges)
    out = model(own_x, own_edges)
    with pytest.raises(SylvieError, match=r"shard the plain tensor of shape \(12,\)"):
        F.cross_entropy(out, y)
    with pytest.raises(SylvieError, match="different calls of shard"):
        model(own_x, model.shard(x, edge_index, y, mask)[1])


def test_result_of_a_computation_with_gradients() -> None:
    x, edge_index, *_ = data()
    with pytest.raises(PartitionError, match="result of a computation that requires gradients"):
        on_ranks(1, lambda model: model.shard(x.requires_grad_() * 2, edge_index))


@pytest.mark.parametrize(("line", "message"), [
    (lambda h: h * (h.sum() if h.mean() > 0 else 1), "branch"),
    (lambda h: h @ h.t(), "dense"),
    (lambda h: h.sort(0)[0], "sort"),
    (lambda h: h + torch.randn_like(h), "random"),
    (lambda h: h * float(h.max()), "values computed from features"),
    (lambda h: h.reshape(-1, 2), "shape"),
    (lambda h: h.chunk(4)[0], "not the same for every number of nodes"),
    (lambda h: h.split([2, h.size(0) - 2])[0], "split_with_sizes works along the dimension that is spread"),
])  # fmt: skip
def test_models_that_can_not_be_exact_are_refused(line: Callable[[Tensor], Tensor], message: str) -> None:
    class Refused(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return line(super().forward(x, edge_index))

    report = sylvie_fx.verify(Refused(), *data()[:2], parts=2, timeout=20)
    assert report.refused is not None
    assert "test_bad_input.py:" in report.refused
    assert re.search(message, report.refused), report.refused


def test_a_refusal_leaves_later_models_alone() -> None:
    """As in a search over models, which catches the refusal."""

    class Dense(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            h = super().forward(x, edge_index)
            return h @ h.t()

    net, dense = Net(), Dense()
    tried = [(model, ProgramCache()) for model in (net, dense, net)]

    def rank(transport: Any) -> list[str]:
        said = []
        for model, cache in tried:
            own = DistributedModule(copy.deepcopy(model), Options(timeout=20), default_passes(), transport, cache)
            try:
                said.append(f"{float(own(*own.shard(*data()[:2])).sum().detach()):.4f}")
            except SylvieError as error:
                said.append(str(error))
        return said

    for first, refused, second in run_ranks(2, rank, 20):
        assert "a dense product of all rows" in refused
        assert first == second


class Half(prune.BasePruningMethod):
    """A user's own way of pruning: a hook that torch registers."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return (torch.arange(t.numel()).view_as(t) % 2 * default_mask).to(default_mask.dtype)


def look(module: nn.Module, args: Any, out: Any = None) -> None:
    """A hook that does nothing."""


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("called", [False, True])
def test_hooks_of_modules_are_refused_before_and_after_the_first_call(kind: str, called: bool) -> None:
    model = sylvie_fx.distribute(Net())
    x, edge_index = model.shard(*data()[:2])
    plain = model(x, edge_index).full() if called else None
    handle = getattr(model.one, f"register_{kind}")(look)
    line = f"test_bad_input.py:{look.__code__.co_firstlineno}: a module has a (forward|backward) hook in module 'one'"
    with pytest.raises(CaptureError, match=line):
        model(x, edge_index)
    handle.remove()
    assert plain is None or torch.equal(model(x, edge_index).full(), plain)


def test_hooks_on_every_module_are_refused() -> None:
    model = sylvie_fx.distribute(Net())
    x, edge_index = model.shard(*data()[:2])
    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        with pytest.raises(CaptureError, match="a module has a forward hook"):
            model(x, edge_index)
    finally:
        handle.remove()


def test_hooks_that_torch_registers_are_captured() -> None:
    torch.manual_seed(0)
    model = Net()
    nn.utils.spectral_norm(model.one)
    Half.apply(model.two, "weight")
    model.eval()  # a spectral norm makes a step in training
    expected = model(*data()[:2])
    distributed = sylvie_fx.distribute(model)
    torch.testing.assert_close(distributed(*distributed.shard(*data()[:2])).full(), expected)


def test_a_hook_on_the_distributed_model_sees_its_result() -> None:
    model, seen = sylvie_fx.distribute(Net()), []
    x, edge_index = model.shard(*data()[:2])
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(x, edge_index)
    assert [one is out for one in seen] == [True]
