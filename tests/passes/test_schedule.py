from __future__ import annotations

import pytest
import torch.nn.functional as F
from exchange_models import Attention, BothWays, Stack, Sum, compiled, graph
from torch import Tensor, nn
from torch_geometric.nn import GINConv

import sylvie_fx
from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.bucket_gradients import BucketGradients
from sylvie_fx.passes.schedule import Schedule
from sylvie_fx.passes.split_exchanges import SplitExchanges

NEW = ("split-exchanges", "schedule", "bucket-gradients")


class WithRoot(nn.Module):
    """Neighbours and the node itself, each through its own layer, the node's last."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.neighbours = Sum(features, out)
        self.root = nn.Linear(features, out, dtype=self.neighbours.linear.weight.dtype)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.neighbours(x, edge_index) + self.root(x)


def operators(program: Program) -> list[str]:
    return [str(n.target).removeprefix("sylvie.").removesuffix(".default") for n in program.graph.nodes
            if n.op == "call_function" and (n.target in ops.CROSSING or "linear" in str(n.target))]  # fmt: skip


def two_layers(*left_out: str) -> Program:
    passes = sylvie_fx.default_passes().without(*left_out)
    return compiled(Stack(WithRoot(2048, 8), WithRoot(8, 4)), *graph(2048), passes=passes).program("train")


def test_an_exchange_and_the_sum_behind_it_are_taken_apart() -> None:
    assert operators(two_layers(*NEW)) == [
        "sync_gradients", "aten.linear", "halo_exchange", "aten.linear",
        "aten.linear", "halo_exchange", "aten.linear",
    ]  # fmt: skip
    assert operators(two_layers("schedule", "bucket-gradients")) == [
        "sync_gradients", "aten.linear", "halo_start", "spmm_inner", "halo_wait", "spmm_halo", "aten.linear",
        "aten.linear", "halo_start", "spmm_inner", "halo_wait", "spmm_halo", "aten.linear",
    ]  # fmt: skip


def test_what_needs_no_halo_row_runs_while_rows_travel() -> None:
    assert operators(two_layers("bucket-gradients")) == [
        "sync_gradients", "aten.linear", "halo_start", "spmm_inner", "aten.linear", "halo_wait", "spmm_halo",
        "aten.linear", "halo_start", "spmm_inner", "aten.linear", "halo_wait", "spmm_halo",
    ]  # fmt: skip


def test_gradients_are_reduced_layer_by_layer() -> None:
    assert operators(two_layers()) == [
        "sync_finish", "sync_start", "aten.linear", "halo_start", "spmm_inner", "aten.linear", "halo_wait", "spmm_halo",
        "sync_start", "aten.linear", "halo_start", "spmm_inner", "aten.linear", "halo_wait", "spmm_halo",
    ]  # fmt: skip


def test_other_readers_get_own_and_halo_rows_joined(golden) -> None:
    golden(compiled(Attention(2048, 16), *graph(2048)).program("train"))


class Isomorphism(nn.Module):
    """Two layers whose first lets both what it sums and the sum cross, since the cut prefers them to what a mask moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            GINConv(nn.Sequential(nn.Linear(n, 16), nn.ReLU(), nn.Linear(16, m)), train_eps=True).double()
            for n, m in ((2048, 16), (16, 7))
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(F.dropout(x, 0.5, self.training), edge_index)
        return self.second(F.dropout(h.relu(), 0.5, self.training), edge_index)


def test_what_is_summed_may_be_read_behind_the_sum_too() -> None:
    text = str(compiled(Isomorphism(), *graph(2048), bits=1).program("train"))
    assert text.count("aten.cat") == text.count("halo_start(") == 2


def test_values_that_cross_once_and_partial_sums_stay_whole() -> None:
    found = operators(compiled(Sum(2, 4), *graph(2)).program("train"))
    assert "halo_exchange" in found
    assert "halo_start" not in found
    both = operators(compiled(Stack(Sum(2048, 8), BothWays(8, 4)), *graph(2048)).program("train"))
    assert {"halo_start", "halo_reduce"} <= set(both)


def test_an_eval_program_has_no_buckets() -> None:
    net = compiled(Stack(Sum(2048, 8), Sum(8, 4)).eval(), *graph(2048))
    assert "sync_finish" not in operators(net.program("eval"))


@pytest.mark.parametrize("one", [SplitExchanges(), Schedule(), BucketGradients()], ids=lambda p: p.name)
def test_a_second_run_changes_nothing(one: sylvie_fx.Pass) -> None:
    program = two_layers() if isinstance(one, BucketGradients) else two_layers("bucket-gradients")
    text = str(program)
    assert str(one.run(program, PassContext())) == text


def test_writes_keep_their_order() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum, self.norm = Sum(2048, 4), nn.BatchNorm1d(4).double()

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.norm(self.norm(self.sum(x, edge_index)))

    def writes(*left_out: str) -> list[str]:  # those to one buffer, buffer after buffer
        program = compiled(Norm(), *graph(2048), passes=sylvie_fx.default_passes().without(*left_out)).program("train")
        found = [n for n in program.graph.nodes if n.op == "call_function" and getattr(n.target, "_schema", None)]
        # The batch of each update tells the two calls of the layer apart.
        return [
            f"{n.target} {n.args}" for n in sorted(found, key=lambda n: str(n.args[0])) if n.target._schema.is_mutable
        ]

    assert len(writes()) == 4
    assert writes() == writes(*NEW)
