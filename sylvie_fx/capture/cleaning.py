"""What torch.export adds to a graph and a program does not want: guards, range checks, pytree calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.effects import has_effect


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of a graph in order."""
    return [n for n in graph.nodes if n.op == "placeholder"]


_CHECKS = frozenset({
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default, torch.ops.aten.sym_constrain_range_for_size.default,
    torch.ops.aten._assert_tensor_metadata.default,
})  # fmt: skip


def clean(module: fx.GraphModule, *, decided: bool) -> None:
    """Drop guards and the sizes' assertions: sizes of masks differ between ranks, and kinds are checked by the api.

    Args:
        module: What was exported.
        decided: Python branches were decided: keep what torch asserts of sizes, and check every size that became a number.
    """
    graph = module.graph
    if decided:
        _check_sizes(graph)
    for node in list(graph.nodes):
        if node.op == "call_module" or (node.target in _CHECKS and not (decided and _is_decision(node))):
            node.replace_all_uses_with(None)
            graph.erase_node(node)
    output = next(n for n in graph.nodes if n.op == "output")
    (value,) = output.args
    if isinstance(value, fx.Node):  # the pytree call of the exported signature
        value = value.args[0]
    output.args = (list(value),)
    graph.set_codegen(fx.graph.CodeGen())
    _erase_unused(graph)
    module.recompile()


def _check_sizes(graph: fx.Graph) -> None:
    """Assert sizes that depend on values and became numbers: the assertions of torch.export compare constants by then."""
    for node in list(graph.nodes):
        if not _sized_by_values(node):
            continue
        value = node.meta["val"]
        several = isinstance(value, (tuple, list))
        sizes: list[tuple[Any, Any]] = [([*([i] if several else []), "size", d], s)
                 for i, t in enumerate(value if several else [value]) for d, s in enumerate(t.shape)]  # fmt: skip
        for path, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_number:  # a symbol that was replaced
                with graph.inserting_after(node):
                    check = graph.call_function(ops.check_size, (node, path, int(size), f"a size is {size}"))
                check.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def _sized_by_values(node: fx.Node) -> bool:
    """Whether the shape of an operator's results depends on the values of its operands."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    if op is torch.ops.aten.index.Tensor:
        indices = [i for i in node.args[1] if isinstance(i, fx.Node)]  # type: ignore[union-attr]
        return any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in indices)
    return torch.Tag.dynamic_output_shape in op.tags or op is torch.ops.aten.bincount.default


def _is_decision(node: fx.Node) -> bool:
    """Whether an assertion says more than the range of a size."""
    condition = node.args[0] if node.args else None
    if node.target is not torch.ops.aten._assert_scalar.default or not isinstance(condition, fx.Node):
        return False
    return not (condition.target in (operator.ge, operator.le) and isinstance(condition.args[1], int))


def _erase_unused(graph: fx.Graph) -> None:
    mutating = {n for n in graph.nodes if n.op == "call_function" and _mutates(n)}
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in mutating:
            graph.erase_node(node)


def _mutates(node: fx.Node) -> bool:
    return node.target in _CHECKS or has_effect(node)
