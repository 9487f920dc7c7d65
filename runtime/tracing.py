"""One event for each node of a program that runs, forward, and for what autograd runs for it, backward."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from sylvie_fx.ir import ops
from sylvie_fx.ir.program import meta
from sylvie_fx.ir.schedule import exchange_of
from sylvie_fx.ir.timeline import BACKWARD, FORWARD
from sylvie_fx.runtime.timeline import Recorder

#: Operators whose time is communication: what they wait for and code is recorded where it happens.
_CROSSING = ops.CROSSING - {ops.replicated_output, ops.spmm_inner, ops.spmm_halo}


def traced(
    recorder: Recorder,
    program: str,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    call: Callable[[fx.Node, tuple[Any, ...], Mapping[str, Any]], Any],
) -> Any:
    """Call a node and record it; its backward pass is recorded when it comes."""
    if node.target is operator.getitem:  # no work, and nothing that a person wants to see
        return call(node, args, kwargs)
    where: dict[str, Any] = {"step": recorder.step, "module": meta(node).module, "program": program}
    if node.target in _CROSSING:
        scope = {**where, "exchange": exchange_of(node)}
        with recorder.scope(**scope, direction=FORWARD):
            value = call(node, args, kwargs)
        for function in _functions(args, kwargs, value):
            _scope_backward(recorder, function, {**scope, "direction": BACKWARD})
        return value
    with recorder.span("compute", node.name, direction=FORWARD, **where):
        value = call(node, args, kwargs)
    for function in _functions(args, kwargs, value):
        _span_backward(recorder, function, node.name, where)
    return value


def _functions(args: Any, kwargs: Any, value: Any) -> list[Any]:
    """The autograd functions between a node's arguments and its results."""
    given = {t.grad_fn for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.grad_fn is not None}
    found: list[Any] = []
    open_ = [t.grad_fn for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    seen = set(given)
    while open_:
        function = open_.pop()
        if (
            function is None or function in seen or hasattr(function, "variable")
        ):  # a leaf's accumulation is nobody's operator
            continue
        seen.add(function)
        found.append(function)
        open_ += [following for following, _ in function.next_functions]
    return found


def _span_backward(recorder: Recorder, function: torch.autograd.graph.Node, name: str, where: dict[str, Any]) -> None:
    started = [0.0]

    def before(gradients: Any) -> None:
        started[0] = time.perf_counter()

    def after(inputs: Any, outputs: Any) -> None:
        recorder.add("compute", name, started[0], time.perf_counter(), direction=BACKWARD, **where)

    function.register_prehook(before)
    function.register_hook(after)


def _scope_backward(recorder: Recorder, function: torch.autograd.graph.Node, scope: dict[str, Any]) -> None:
    outer: list[dict[str, Any]] = []

    def before(gradients: Any) -> None:
        outer.append(recorder.enter(**scope))

    def after(inputs: Any, outputs: Any) -> None:
        recorder.leave(outer.pop())

    function.register_prehook(before)
    function.register_hook(after)
