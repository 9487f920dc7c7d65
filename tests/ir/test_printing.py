from __future__ import annotations

import torch
from pass_support import Layer, after
from torch import Tensor


def layer(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.zeros_like(h).index_add(0, e[1], h[e[0]]))


def test_a_program_prints_shapes_placements_modules_and_layouts(golden) -> None:
    golden(after(layer, "sync-gradients"))


def test_the_text_is_the_same_for_the_same_program() -> None:
    assert str(after(layer, "insert-halo")) == str(after(layer, "insert-halo"))


def test_lines_name_the_users_source() -> None:
    assert " | test_printing.py:" in str(after(layer, "canonicalize"))


def test_a_snapshot_is_a_copy() -> None:
    program = after(layer, "canonicalize")
    copy = program.snapshot()
    program.graph.erase_node(next(n for n in program.graph.nodes if n.op == "output"))
    assert "return" in str(copy)
    assert "return" not in str(program)
