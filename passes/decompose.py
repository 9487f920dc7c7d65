"""Break composite operators without a placement rule into operators that have one."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from sylvie_fx.ir.program import Program
from sylvie_fx.ir.rules import find_rule
from sylvie_fx.passes.base import Pass, PassContext, refuse

aten = torch.ops.aten

KEEP = frozenset({aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default})
"""Operators without a rule that canonicalize recognises as they are."""


@dataclass(frozen=True)
class Decompose(Pass):
    """Replace composite operators that have no placement rule by their definition in PyTorch.

    Requires: nothing.
    Ensures: a composite operator is left only where it has a placement rule or its definition can not be traced.

    Before::

        out = aten.outer(x, a)

    After::

        view = aten.view(x, [N, 1])
        out = aten.mul(view, a)
    """

    name: ClassVar[str] = "decompose"

    def run(self, program: Program, context: PassContext) -> Program:
        """Decompose repeatedly, since a definition may use composites itself."""
        for _ in range(4):
            nodes = [n for n in program.graph.nodes if _composite(n)]
            inlined = [_inline(node) for node in nodes]  # all of them, not only up to the first that can be
            if not any(inlined):
                break
        return program


def _composite(node: fx.Node) -> bool:
    op = node.target
    return (
        isinstance(op, OpOverload)
        and op.namespace == "aten"
        and op not in KEEP
        and find_rule(op) is None
        and not op._schema.is_mutable
        and op._can_decompose()
    )


def _inline(node: fx.Node) -> bool:
    op = node.target
    assert isinstance(op, OpOverload)
    leaves, spec = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    tensors = [n for n in leaves if isinstance(n, fx.Node)]
    if any(isinstance(n.meta["val"], torch.Tensor) is False for n in tensors):
        return False  # sizes as arguments: their definition would be traced for one size
    unique = list(dict.fromkeys(tensors))

    def definition(*values: torch.Tensor) -> object:
        given = dict(zip(unique, values, strict=True))
        args, kwargs = torch.utils._pytree.tree_unflatten(
            [given.get(v, v) if isinstance(v, fx.Node) else v for v in leaves], spec
        )
        return op.decompose(*args, **kwargs)

    mode = detect_fake_mode([n.meta["val"] for n in unique])
    if mode is None:
        return False
    fixed = set(mode.shape_env.replacements) if mode.shape_env is not None else set()
    with mode:
        traced = make_fx(definition)(*[n.meta["val"] for n in unique])
    if mode.shape_env is not None and set(mode.shape_env.replacements) - fixed:
        raise refuse(node, f"{op} reads the number of rows as a plain number", "its definition then holds for one graph only",
                     "write it with operators that PyTorch does not define by others")  # fmt: skip
    if any(n.target is op for n in traced.graph.nodes):
        return False
    values: dict[fx.Node, fx.Node] = dict(
        zip([n for n in traced.graph.nodes if n.op == "placeholder"], unique, strict=True)
    )
    for inner in traced.graph.nodes:
        if inner.op == "call_function":
            with node.graph.inserting_before(node):
                values[inner] = node.graph.node_copy(inner, lambda n: values[n])
            for key in ("stack_trace", "nn_module_stack"):
                if key in node.meta:
                    values[inner].meta[key] = node.meta[key]
            values[inner].meta.pop("sylvie", None)
        elif inner.op == "get_attr":
            return False
        elif inner.op == "output":
            result = inner.args[0]
            if isinstance(result, fx.Node):
                node.replace_all_uses_with(values[result])
                continue
            users = list(node.users)
            if any(user.target is not operator.getitem for user in users):
                return False
            for user in users:
                user.replace_all_uses_with(values[result[user.args[1]]])
                node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True
