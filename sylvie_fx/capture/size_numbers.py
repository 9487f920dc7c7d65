"""Sizes that a model's Python code asks for: ``float(x.size(0))``, ``math.sqrt(n)``, ``range(int(n))``, ``if n > 100:``.

torch.export makes such a size a constant everywhere, or restricts its range, so that the program fits one graph. Here the
code gets the answer that is right in the capture, the size stays a symbol, and the program notes which answer was given:
on a graph where it is another one the model is captured again (engine.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from sylvie_fx.ir.decided import decided
from sylvie_fx.ir.source import is_ours


@contextlib.contextmanager
def sizes_as_numbers(noted: Callable[[], None]) -> Iterator[None]:
    """In force while a forward pass is captured.

    Args:
        noted: Called when the code has been given an answer, which makes the program one for graphs of these sizes.
    """

    def reading(original: Callable[[Any], Any], kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read(size: Any) -> Any:
            # torch asks too, to make shapes of sizes: these have to stay symbols or become constants.
            value = None if is_ours(sys._getframe(1).f_code.co_filename) else _value(size)
            if value is None:
                return original(size)
            noted()
            _note(size, value)
            return kind(value)

        return read

    before = {(owner, name): getattr(owner, name) for owner, name, _ in _READS}
    try:
        for owner, name, kind in _READS:
            setattr(owner, name, reading(before[owner, name], kind))
        yield
    finally:
        for (owner, name), original in before.items():
            setattr(owner, name, original)


def size_as_number(size: Any) -> int:
    """The number that a size has in the capture, noted as if the model's own code had asked for it."""
    value = _value(size) if isinstance(size, torch.SymInt) else None
    if value is None:
        return int(size)
    _note(size, value)
    return int(value)


def _note(size: Any, value: float) -> None:
    """Let the program check that a size is that number."""
    tensor = torch.scalar_tensor(size, dtype=torch.float64 if isinstance(size, torch.SymFloat) else torch.int64)
    decided(torch.eq(tensor, value), f"{size} is {value}")


_READS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (torch.SymInt, "__index__", int),
    (torch.SymInt, "__int__", int),
    (torch.SymFloat, "__float__", float),
    (torch.SymFloat, "__int__", int),
    (torch.SymBool, "__bool__", bool),
)


def _value(size: Any) -> int | float | None:
    """What a size is in the capture, without making it a constant; None where torch knows it, or does not."""
    expr = size.node.expr
    if isinstance(size, torch.SymBool):
        if statically_known_true(size) or statically_known_true(torch.sym_not(size)):
            return None
        unbacked = expr.free_symbols - set(size.node.shape_env.backed_var_to_val)
        if unbacked and isinstance(expr, (sympy.Eq, sympy.Ne)) and expr.lhs.free_symbols and expr.rhs.free_symbols:
            return None  # torch learns that two sizes of masks are equal
    if expr.is_number:
        return None
    sizes = size.node.shape_env
    known = {**sizes.backed_var_to_val, **sizes.real_tensor_prop_unbacked_vals}
    found = expr.xreplace({s: known[s] for s in expr.free_symbols if s in known})
    if isinstance(size, torch.SymBool):
        return int(bool(found)) if found in (sympy.true, sympy.false) else None
    if not found.is_number:
        return None
    return float(found) if isinstance(size, torch.SymFloat) else int(found)
