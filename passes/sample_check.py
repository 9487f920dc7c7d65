"""Run the program on the capture's sample, as it was captured and as it is now: they must agree."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import VerifyError
from sylvie_fx.ir.program import Program
from sylvie_fx.passes.base import Pass, PassContext

aten = torch.ops.aten

log = logging.getLogger(__name__)

_DROPOUTS = frozenset({aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default, ops.node_dropout})


@dataclass(frozen=True)
class SampleCheck(Pass):
    """Compare the program's results on the sample with those of the captured graph; dropout is left out of both.

    Requires: nothing; it must stand in front of split-prologue, after which a program needs a graph to be bound to.
    Ensures: the passes before it have kept the meaning of the program, on this sample. It changes nothing.
    """

    name: ClassVar[str] = "sample-check"

    def run(self, program: Program, context: PassContext) -> Program:
        """Run both and compare.

        Raises:
            VerifyError: A result differs.
        """
        if context.captured is None or program.prologue is not None:
            return program
        with torch.no_grad():
            try:
                before = _run(context.captured, context.samples)
            except (IndexError, RuntimeError) as error:
                # Rows of a sample are cut or repeated: an index into a table of the model may then be out of range.
                log.info("no comparison on the sample, which the captured graph does not take: %s", error)
                return program
            after = _run(program, context.samples)
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            if not isinstance(a, Tensor):
                continue
            alike = a.shape == b.shape and a.dtype == b.dtype
            if not alike or not torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise VerifyError(
                    f"result {number} of the program on the sample is not that of the captured graph",
                    why="a pass changed the program's meaning",
                    remedy="this is a fault of sylvie_fx, not of the model: please report it with the model",
                )
        return program


def _run(program: Program, samples: Sequence[Tensor]) -> list[Any]:
    """The results of a program before split-prologue, on copies of the model's buffers."""
    buffers = {name for name, _ in program.module.named_buffers()}
    values: dict[fx.Node, Any] = {}
    inputs = iter(samples)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs).detach()
        elif node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(program.module)
            values[node] = value.clone() if str(node.target) in buffers else value
        elif node.op == "output":
            return list(fx.node.map_arg(node.args[0], lambda n: values[n]))
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = args[0] if node.target in _DROPOUTS else node.target(*args, **kwargs)
    raise AssertionError("a program ends with an output")
