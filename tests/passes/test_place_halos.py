from __future__ import annotations

import torch
from exchange_models import Attention, Stack, Sum, compiled, graph, lines
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir import ops
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.place_halos import PlaceHalos
from sylvie_fx.report.explain import exchange_rows

UNFUSED = sylvie_fx.default_passes().without(
    "fuse-aggregation", "quantize", "split-exchanges", "schedule", "bucket-gradients"
)


def crossing(net: sylvie_fx.DistributedModule) -> list[str]:
    return [str(n.args[0]) for n in net.program("train").graph.nodes if n.target is ops.halo_exchange]


def test_a_score_is_recomputed_from_the_value_that_crosses_anyway() -> None:
    x, edges = graph(2048)
    naive = compiled(Attention(2048, 16), x, edges, passes=UNFUSED.without("place-halos"))
    assert crossing(naive) == ["linear", "sigmoid"]
    net = compiled(Attention(2048, 16), x, edges, passes=UNFUSED)
    assert crossing(net) == ["linear"]
    text = [line.split(" = ")[1] for line in lines(net, "halo_exchange(", "score_synced", "sum_2 =", "sigmoid_1 =")]
    assert text == [
        "getitem(sync_gradients_default, 0)",
        "sylvie.halo_exchange(linear, 0, 0)",
        "aten.mul.Tensor(halo_exchange_default_2, model_score_synced)",
        "aten.sum.dim_IntList(mul_2, [-1])",
        "aten.sigmoid(sum_2)",
    ]


def test_a_wide_layer_sends_its_narrow_side() -> None:
    wide = Stack(Sum(12, 8), Sum(8, 64))
    assert crossing(compiled(wide, *graph(), passes=UNFUSED))[1] != "linear_1"
    narrow = Stack(Sum(12, 64), Sum(64, 8))
    assert crossing(compiled(narrow, *graph(), passes=UNFUSED))[1] == "linear_1"


class Residual(Sum):
    """Adds the nodes' own values: what crosses for the next layer is computed from what crosses for this one."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.linear(x) + super().forward(x, edge_index)


def test_layers_that_are_cut_together_keep_their_own_bits_and_staleness() -> None:
    model = Stack(Residual(2048, 40), Residual(40, 40), Residual(40, 40))
    net = compiled(model, *graph(2048), bits={"layers.1": 4, "layers.2": 2}, staleness={"layers.2": 1})
    rows = exchange_rows(net.program("train"), None, Options())
    assert [row.module for row in rows] == ["layers.0", "layers.1", "layers.2"]
    assert [(row.coding.forward.bits, str(row.pace)) for row in rows] == [(32, "0"), (4, "0"), (2, "1")]


def test_inputs_cross_once_where_recomputing_is_cheap() -> None:
    net = compiled(Sum(4, 64), *graph(4))
    rows = exchange_rows(net.program("train"), None, Options())
    assert [(r.value, r.coding.once) for r in rows] == [("args_0", True)]


def test_a_slow_link_is_spared_by_computing_again_what_a_fast_one_brings() -> None:
    for link, values in ((0.1, ["args_0"]), (100.0, ["linear"])):
        net = compiled(Sum(2048, 1), *graph(2048), link=link)
        assert [row.value for row in exchange_rows(net.program("train"), None, Options())] == values


def test_the_cut_never_costs_more_than_exchanging_at_the_gather() -> None:
    for model in (
        Attention(12, 6),
        Stack(Sum(12, 32), Attention(32, 4)),
        Stack(Attention(12, 3), Sum(3, 40), Sum(40, 2)),
    ):
        for bits in (32, 1):
            costs = []
            for passes in (sylvie_fx.default_passes().without("place-halos"), sylvie_fx.default_passes()):
                rows = exchange_rows(
                    compiled(model, *graph(), passes=passes, bits=bits).program("train"), None, Options(bits=bits)
                )
                costs.append(sum(0.0 if r.coding.once else r.coding.forward.row_bytes(r.columns, 8) for r in rows))
            assert costs[1] <= costs[0]


def test_recomputed_rows_are_exact_dropout_and_batch_norm_included() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Sum(12, 6), Attention(6, 24)
            self.norm = nn.BatchNorm1d(6, dtype=torch.float64)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.dropout(torch.relu(self.norm(self.first(x, edge_index))), 0.4, self.training)
            return self.second(h, edge_index)

    for partition in ("random", "metis"):
        report = sylvie_fx.verify(Normed(), *graph(), parts=4, partition=partition, steps=3)
        assert report.exact, report


def test_a_code_that_follows_a_value_crosses_in_front_of_the_dropout() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Sum(12, 32)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.dropout(torch.relu(self.first(x, edge_index)), 0.4, self.training)
            for _ in range(40):  # as many paths to the mask as no search may follow one by one
                h = h * h + h
            return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])

    for options, value in (({}, "add_39"), ({"bits": 1, "variant": "plain"}, "add_39"), ({"bits": 1}, "relu")):
        net = compiled(Masked(), *graph(), passes=UNFUSED, **options)
        assert crossing(net)[1] == value, options


def test_what_moves_with_a_mask_crosses_where_less_does_not_cross_in_front_of_it_or_it_takes_long() -> None:
    class Masked(nn.Module):
        def __init__(self, wide: int, out: int) -> None:
            super().__init__()
            self.first, self.second = Sum(12, wide), Sum(wide, out)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            h = torch.nn.functional.dropout(torch.relu(self.first(x, edge_index)), 0.4, self.training)
            return self.second(h, edge_index)

    follows, plain = {"bits": 1}, {"bits": 1, "variant": "plain"}
    for sizes, options, value in (
        ((64, 45), follows, "relu"),
        ((64, 45), plain, "linear_1"),
        ((64, 8), follows, "linear_1"),  # 16 bytes a row, relu 24
        ((512, 512), follows, "linear_1"),  # as many bytes, but much to compute
    ):
        net = compiled(Masked(*sizes), *graph(), passes=UNFUSED, **options)
        assert crossing(net)[1] == value, (sizes, options)


def test_a_second_run_changes_nothing() -> None:
    program = compiled(Stack(Attention(12, 8), Attention(8, 4)), *graph(), passes=UNFUSED).program("train")
    before = str(program)
    assert str(PlaceHalos().run(program, PassContext())) == before


def test_without_an_aggregation_nothing_happens() -> None:
    net = compiled(_RowLocal(), *graph())
    assert crossing(net) == []


class _RowLocal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.linear(x)
