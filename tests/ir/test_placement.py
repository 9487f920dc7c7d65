from __future__ import annotations

from sylvie_fx.ir.placement import REPLICATED, Component, Layout, Rows


def test_placements_print() -> None:
    assert [str(p) for p in (REPLICATED, Rows("N"), Rows("N", 1), Rows("E", 0, 4), Rows("N + u0", 0, 1, 2))] == [
        "replicated", "rows[N]", "rows[N]@1", "rows[E*4]", "rows[N + u0]#2",
    ]  # fmt: skip


def test_layouts_print() -> None:
    layouts = [Layout("entry"), Layout("by", index="dst", target=0), Layout("concat", parts=((1, "E"), (0, "N"))),
               Layout("slice", parts=((3, "E"), (1, "E"), (0, "N")), position=1), Layout("blocks")]  # fmt: skip
    assert [str(c) for c in map(Component, range(5), "EEEEE", layouts)] == [
        "#0: E entry", "#1: E by dst into N#0", "#2: E concat of #1, #0", "#3: E part 1 of #3", "#4: E blocks",
    ]  # fmt: skip
