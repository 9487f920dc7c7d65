"""Which results of a captured graph are views of its inputs."""

from __future__ import annotations

import operator

from torch import Tensor, fx
from torch._ops import OpOverload

from sylvie_fx.ir.program import Program


def viewed_inputs(program: Program) -> list[int | None]:
    """For each result the position of the input in whose memory it lies; None where it has memory of its own.

    What may copy (``reshape``, ``contiguous``) is taken for a view: whether it does is known of real strides alone.
    """
    output = next(n for n in program.graph.nodes if n.op == "output")
    places = {item.name: number for number, item in enumerate(program.inputs)}
    results = [_origin(value) for value in output.args[0]]
    return [None if origin is None else places.get(origin.name) for origin in results]


def _origin(value: object) -> fx.Node | None:
    node = value
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is not operator.getitem and not _is_view(node):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.op == "placeholder" else None


def _is_view(node: fx.Node) -> bool:
    """Whether an operator hands on the memory of its first argument; a conversion to another type does not."""
    op = node.target
    if not isinstance(op, OpOverload) or not op._schema.returns or op._schema.returns[0].alias_info is None:
        return False
    source, result = (n.meta.get("val") if isinstance(n, fx.Node) else None for n in (node.args[0], node))
    return not (isinstance(source, Tensor) and isinstance(result, Tensor)) or source.dtype == result.dtype
