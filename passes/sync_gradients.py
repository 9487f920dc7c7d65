"""Gradients of what is replicated: one bucketed all_reduce for the parameters, and no double counting of the loss."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sylvie_fx.ir import ops
from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.program import Program, is_tensor, meta
from sylvie_fx.passes.base import Pass, PassContext
from sylvie_fx.passes.build import Builder
from sylvie_fx.passes.dependence import needs_gradient


@dataclass(frozen=True)
class SyncGradients(Pass):
    """Read parameters through one ``sync_gradients`` and return replicated results through ``replicated_output``.

    Requires: infer-placement, global-reductions.
    Ensures: outside the program every gradient of a replicated tensor is the whole gradient, the same on every rank;
    inside it every rank holds a term of it. The backward of ``sync_gradients`` sums the terms, once, in one bucket.
    A result that is computed from sums over ranks alone, as a loss is, has no terms inside: every rank is given the whole
    gradient and carries on with it, and the sums are marked ``shared``: nothing is sent for their backward.

    Before::

        w = self.lin.weight
        out = aten.linear(x, w)

    After::

        w = self.lin.weight
        sync = sylvie.sync_gradients([w])
        w_1 = getitem(sync, 0)
        out = aten.linear(x, w_1)
    """

    name: ClassVar[str] = "sync-gradients"

    def run(self, program: Program, context: PassContext) -> Program:
        """Wrap parameters and replicated inputs, then replicated outputs."""
        graph = program.graph
        if any(n.target is ops.sync_gradients for n in graph.nodes):
            return program
        parameters = [n for n in graph.nodes if _is_differentiable(program, n)]
        if parameters:
            anchor = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
            for node in parameters:  # all of them in front of what reads them
                if node.op == "get_attr":
                    anchor.prepend(node)
            builder = Builder(anchor)
            sync = builder.call(
                ops.sync_gradients, parameters, val=[n.meta["val"] for n in parameters], place=REPLICATED
            )
            meta(sync).where = meta(sync).module = ""
            for i, node in enumerate(parameters):
                item = builder.call(operator.getitem, sync, i, val=node.meta["val"], place=REPLICATED)
                item.name = f"{node.name}_synced"
                meta(item).where = meta(item).module = ""
                for user in list(node.users):
                    if user is not sync:
                        user.replace_input_with(node, item)
        output = next(n for n in graph.nodes if n.op == "output")
        assert isinstance(output.args[0], (list, tuple))
        results = list(output.args[0])
        whole = _share_sums(program, output)
        for i, value in enumerate(results):
            if not isinstance(value, fx.Node) or isinstance(meta(value).placement, Rows):
                continue
            if is_tensor(value) and value.meta["val"].dtype.is_floating_point and value not in whole:
                results[i] = Builder(output).call(ops.replicated_output, value, val=value.meta["val"], place=REPLICATED)
        output.args = (results,)
        return program


def _is_differentiable(program: Program, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = program.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return isinstance(value, torch.Tensor) and value.requires_grad
    entry = next((i for i in program.inputs if i.name == node.name), None)
    return bool(node.op == "placeholder" and entry and not entry.static and not isinstance(entry.rows, Rows)
                and is_tensor(node) and node.meta["val"].requires_grad)  # fmt: skip


def _share_sums(program: Program, output: fx.Node) -> set[fx.Node]:
    """Mark the sums over ranks whose gradient every rank is given as a whole; the results that are computed from them."""
    results = {n for n in output.all_input_nodes if not isinstance(meta(n).placement, Rows)}
    behind = {n: _behind_sums(program, n) for n in results}
    whole = {n for n, found in behind.items() if found is not None}
    while True:  # until nothing else reads what lies between the sums and these results: it would give terms
        between = {n for result in whole for n in behind[result] or ()}
        readers = {r: {user for n in behind[r] or () for user in n.users} - between - {output} for r in whole}
        if not any(readers.values()):
            break
        whole -= {r for r in whole if readers[r]}
    for node in between:
        if node.target is ops.all_reduce:
            node.args = (node.args[0], node.args[1], True)
    return whole


def _behind_sums(program: Program, result: fx.Node) -> set[fx.Node] | None:
    """What lies between sums over ranks and a result, both included; None where a gradient takes another way in."""
    found: set[fx.Node] = set()
    stack = [result]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if node.target is ops.all_reduce and node.args[1] == "sum":
            continue
        if node.op != "call_function" or isinstance(meta(node).placement, Rows):
            if needs_gradient(program, node):
                return None
            found.discard(node)
            continue
        stack += node.all_input_nodes
    return found if any(n.target is ops.all_reduce for n in found) else None
