from __future__ import annotations

import pytest
import torch
from pass_support import Layer, after, changes, check_parity
from torch import Tensor

from sylvie_fx.ir.errors import PassError
from sylvie_fx.ir.placement import Layout, Rows
from sylvie_fx.ir.program import placement
from sylvie_fx.passes.infer_placement import InferPlacement


def heads(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x).view(x.size(0), 2, 2)
    return torch.zeros_like(h).index_add(0, e[1], h[e[0]]).flatten(1)


def both_directions(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return torch.zeros_like(h).index_add(0, e[1], h[e[0]]) + torch.zeros_like(h).index_add(0, e[0], h[e[1]])


def joined(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    rows = torch.cat([h[e[0]] * h[e[1]], h])
    index = torch.cat([e[1], torch.arange(x.size(0))])
    return torch.zeros_like(h).index_add(0, index, rows)


def edge_result(m: Layer, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    h = m.a(x)
    return h[e[0]] - h[e[1]], e[0]


def no_rows(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.table.sum() + m.a(x).sum()


def test_placements_and_local_sizes(golden) -> None:
    golden(after(heads, "infer-placement"))


def test_each_direction_has_a_layout_of_its_own() -> None:
    program = after(both_directions, "infer-placement")
    assert len([c for c in program.components.values() if c.layout.kind == "by"]) == 2


def test_joined_rows_are_parts_of_the_whole(golden) -> None:
    golden("\n".join(str(c) for c in after(joined, "infer-placement").components.values()))


def test_results_with_a_row_for_each_edge_have_the_layout_of_the_input() -> None:
    program = after(edge_result, "infer-placement")
    output = next(n for n in program.graph.nodes if n.op == "output")
    assert [placement(v) for v in output.args[0]] == [Rows("E", 0, 1, 0), Rows("E", 0, 1, 0)]


def test_layouts_print() -> None:
    assert str(Layout("by", index="dst", target=0)) == "by dst into N#0"


@pytest.mark.parametrize("function", [heads, both_directions, joined, no_rows])
def test_a_second_run_changes_nothing(function) -> None:
    assert not changes(InferPlacement(), after(function, "infer-placement"))


@pytest.mark.parametrize("function", [heads, both_directions, joined, edge_result, no_rows])
def test_parity(function) -> None:
    check_parity(function)


def all_pairs(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x) @ m.a(x).t()


def merged(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x).t().reshape(-1)


def unknown(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return torch.linalg.qr(m.a(x))[0]


def ranked(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x).sort(0)[0]


def first(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x)[3]


def appended(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return torch.cat([m.a(x), m.table])


@pytest.mark.parametrize(("function", "text"), [
    (all_pairs, "all rows with all rows.*restrict it to the pairs"), (merged, "reshape mixes rows.*keep the dimension"),
    (unknown, "no placement rule.*register one: @sylvie_fx.placement_rule"), (ranked, "sorts over all rows"),
    (first, "by its position"), (appended, "appends replicated rows"),
])  # fmt: skip
def test_refusals_name_line_reason_and_remedy(function, text: str) -> None:
    with pytest.raises(PassError, match=rf"(?s)test_infer_placement.py:\d+: .*{text}"):
        after(function, "infer-placement")


def test_the_module_is_named() -> None:
    def inside(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        return m.norm(m.a(x).t().unsqueeze(0))

    class WithNorm(Layer):
        def __init__(self, function) -> None:
            super().__init__(function)
            self.norm = torch.nn.GroupNorm(2, 4, dtype=torch.float64)

    from exchange_models import compiled, graph

    with pytest.raises(PassError, match=r"in module 'norm'"):
        compiled(WithNorm(inside), *graph())
