"""Which operators do something besides returning a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.decided import decided

aten = torch.ops.aten

CHECKS: frozenset[Any] = frozenset({decided, aten._assert_scalar.default, ops.check_size})
"""What the capture took for granted; split-prologue moves it into the prologue, or refuses it."""

ASSERTIONS: frozenset[Any] = frozenset({aten._assert_async.msg, aten._assert_async.default})
"""The model's own assertions, which are raised wherever their condition is computed."""


def has_effect(node: fx.Node) -> bool:
    """Whether an operator must stay although nothing uses its result: it checks, or changes a tensor."""
    op = node.target
    if op in CHECKS or op in ASSERTIONS:
        return True
    return isinstance(op, torch._ops.OpOverload) and (op._schema.is_mutable or op is aten.batch_norm.default)
