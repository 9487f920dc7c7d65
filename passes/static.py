"""Which values depend on the graph alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import Program, meta
from sylvie_fx.passes.base import refuse

aten = torch.ops.aten

FACTORIES = frozenset({
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.scalar_tensor.default,
})  # fmt: skip
"""Constant tensors that sizes alone determine: made wherever they are needed."""

_RANDOM = (
    aten.dropout, aten.rand, aten.randn, aten.randint, aten.randperm, aten.bernoulli, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.normal, aten.multinomial, aten.exponential, aten.poisson, aten.feature_dropout, aten.alpha_dropout,
    aten.rrelu, aten.uniform, aten.native_dropout, aten.gumbel_softmax if hasattr(aten, "gumbel_softmax") else aten.rand,
)  # fmt: skip

_DROPS_INSIDE = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu, aten.scaled_dot_product_attention)
"""Operators that draw random numbers only where they are given a dropout probability."""


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    op = node.target
    if not isinstance(op, OpOverload):
        return False
    if op is ops.node_dropout:
        return True
    if op.overloadpacket is aten.dropout or op.overloadpacket in (aten.feature_dropout, aten.alpha_dropout):
        return bool(node.args[2]) and bool(node.args[1] != 0.0)
    if op.overloadpacket in _DROPS_INSIDE:
        named = {a.name: node.args[i] for i, a in enumerate(op._schema.arguments) if i < len(node.args)} | node.kwargs
        p = named.get("dropout", named.get("dropout_p", 0.0))
        return bool(p) and bool(named.get("train", True))
    return op.overloadpacket in _RANDOM or torch.Tag.nondeterministic_seeded in op.tags


def mark_static(program: Program) -> None:
    """Set ``meta(node).static`` on every node that is a pure function of static inputs, sizes and constants.

    Raises:
        PassError: A random operator other than dropout.
    """
    entry = {item.name: item.static for item in program.inputs}
    module = program.module
    # With duplicates: a shared layer's parameter has several names, and the graph may use any of them.
    own = {
        n for n, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }
    for node in program.graph.nodes:
        if node.op == "placeholder":
            meta(node).static = entry.get(node.name, True)
        elif node.op == "get_attr":
            meta(node).static = str(node.target) not in own and not _learned(module, str(node.target))
        elif node.op == "call_function":
            if is_random(node):
                if node.target is not ops.node_dropout:
                    check_random(node)
                meta(node).static = False
            else:
                meta(node).static = _is_size(node) or all(meta(n).static for n in node.all_input_nodes)


def _learned(module: fx.GraphModule, path: str) -> bool:
    """Whether a tensor that the model holds without registering it needs a gradient."""
    value: Any = operator.attrgetter(path)(module)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_size(node: fx.Node) -> bool:
    """A symbolic size of the whole graph, whatever tensor it was read from."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool)) or (
        node.target in (operator.add, operator.mul, operator.sub) and not isinstance(node.meta.get("val"), torch.Tensor)
    )


def check_random(node: fx.Node) -> None:
    """Refuse a random operator other than dropout.

    Raises:
        PassError: It is one.
    """
    assert isinstance(node.target, OpOverload)
    name = node.target.overloadpacket
    if name not in (aten.dropout, aten.feature_dropout, aten.dropout_, aten.feature_dropout_):
        raise refuse(
            node, f"aten.{name.__name__} draws random numbers",
            "ranks would draw different numbers than one device does",
            "use dropout, whose mask sylvie_fx keys by global node id, or draw outside the model and pass the result in",
        )  # fmt: skip
