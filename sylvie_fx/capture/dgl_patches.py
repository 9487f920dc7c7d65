"""While a model is captured, DGL's functions also work on stand-in graphs; on real graphs they stay what they are."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sylvie_fx.capture import dgl_ops, dgl_transforms, dgl_udf
from sylvie_fx.capture.dgl_graph import StandInGraph
from sylvie_fx.capture.dgl_index import StandInIndex
from sylvie_fx.capture.dgl_len import symbolic_len
from sylvie_fx.capture.dgl_promises import PromiseMode
from sylvie_fx.dgl import dgl

Function = Callable[..., Any]


@contextmanager
def patched_dgl() -> Iterator[None]:
    """Make DGL work on :class:`StandInGraph`; enter it around the model's forward while exporting.

    Everything that looks a function of DGL up by name sees the replacement, wherever it was imported to. Afterwards,
    also after an error, all of it is DGL's own again. ``len`` of a tensor stays symbolic meanwhile.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(_functions()))
        for module, name, method in _methods():
            stack.enter_context(mock.patch.object(getattr(module, name), "forward", method))
        stack.enter_context(symbolic_len())
        stack.enter_context(PromiseMode())
        yield


@contextmanager
def _replaced(functions: dict[Function, Function]) -> Iterator[None]:
    """Replace functions under every name that a module gives them."""
    by_identity = {id(old): new for old, new in functions.items()}
    changed: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            for name, value in list(names.items()) if type(names) is dict else ():
                new = by_identity.get(id(value))
                if new is not None and names is not None:
                    changed.append((names, name, value))
                    names[name] = new
        yield
    finally:
        for names, name, value in changed:
            names[name] = value


def _functions() -> dict[Function, Function]:
    """For each function of DGL, the one that also takes stand-ins."""
    backend, core = dgl.backend.pytorch, dgl.core
    segment, transforms = sys.modules["dgl.ops.segment"], dgl.transforms.functional
    spmm, typed, readout = sys.modules["dgl.ops.spmm"], sys.modules["dgl.ops.gather_mm"], dgl.readout
    always: dict[Function, Function] = {
        segment.segment_reduce: dgl_ops.segment_reduce,
        segment.segment_softmax: dgl_ops.segment_softmax,
        segment.segment_mm: dgl_ops.segment_mm,
        typed.gather_mm: dgl_ops.gather_mm,
        backend.gather_row: dgl_ops.gather_row,
    }
    by_first_argument: dict[Function, Function] = {
        backend.gspmm: dgl_ops.gspmm,
        backend.gsddmm: dgl_ops.gsddmm,
        backend.edge_softmax: _edge_softmax,
        spmm.gspmm: _gspmm,
        core.invoke_edge_udf: dgl_udf.call_edge_function,
        core.invoke_udf_reduce: dgl_udf.call_reduce_function,
        readout.broadcast_nodes: dgl_transforms.broadcast_nodes,
        readout.broadcast_edges: dgl_transforms.broadcast_edges,
    }
    for name in ("reverse", "add_self_loop", "remove_self_loop", "add_reverse_edges", "to_simple", "to_bidirected"):
        by_first_argument[getattr(transforms, name)] = getattr(dgl_transforms, name)
    built: dict[Function, Function] = {
        dgl.convert.graph: dgl_transforms.graph,
        dgl.convert.heterograph: dgl_transforms.heterograph,
    }
    return {
        **always,
        **{old: _dispatching(old, new, _is_stand_in) for old, new in by_first_argument.items()},
        **{old: _dispatching(old, new, dgl_transforms.is_symbolic) for old, new in built.items()},
    }


def _is_stand_in(graph: Any) -> bool:
    return isinstance(graph, (StandInGraph, StandInIndex))


def _dispatching(old: Function, new: Function, takes: Callable[[Any], bool]) -> Function:
    @functools.wraps(old)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return (new if takes(first) else old)(first, *args, **kwargs)

    return call


def _gspmm(g: StandInGraph, op: str, reduce_op: str, lhs_data: Tensor | None, rhs_data: Tensor | None) -> Tensor:
    return dgl_ops.gspmm(g._graph, op, reduce_op, lhs_data, rhs_data)


def _edge_softmax(index: StandInIndex, logits: Tensor, eids: Any = dgl.base.ALL, norm_by: str = "dst") -> Tensor:
    return dgl_ops.edge_softmax(index, logits, None if dgl.base.is_all(eids) else eids, norm_by)


def _methods() -> list[tuple[Any, str, Function]]:
    """Forward methods that work around an allocator or a kernel, as the mathematics that they stand for."""
    linear = importlib.import_module("dgl.nn.pytorch.linear")
    conv = importlib.import_module("dgl.nn.pytorch.conv")
    return [
        (linear, "TypedLinear", _typed_linear(linear.TypedLinear.forward)),
        (conv, "GroupRevRes", lambda self, g, x, *args: self._forward(g, x, *args)),
        (conv, "GatedGraphConv", _gated_graph(conv.GatedGraphConv.forward)),
        (conv, "SGConv", _uncached(conv.SGConv.forward, "_cached_h")),
        (conv, "TWIRLSConv", _uncached(conv.TWIRLSConv.forward, "cached_unfolding")),
    ]


def _typed_linear(original: Function) -> Function:
    """Whether rows come sorted by type only chooses a kernel."""

    def forward(self: Any, x: Tensor, x_type: Tensor, sorted_by_type: bool = False) -> Any:
        return original(self, x, x_type, False)

    return forward


def _uncached(original: Function, name: str) -> Function:
    """A value kept from an earlier call belongs to the graph of that call."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(self, name, None)
        setattr(self, name, None)
        try:
            return original(self, *args, **kwargs)
        finally:
            setattr(self, name, kept)

    return forward


def _gated_graph(original: Function) -> Function:
    """Edges of each type select their linear map by a mask, where DGL selects the edges."""

    def forward(self: Any, graph: Any, feat: Tensor, etypes: Tensor | None = None) -> Any:
        if not isinstance(graph, StandInGraph) or etypes is None:
            return original(self, graph, feat, etypes)
        feat = torch.cat([feat, feat.new_zeros((feat.shape[0], self._out_feats - feat.shape[1]))], -1)
        for _ in range(self._n_steps):
            messages = None
            for kind, linear in enumerate(self.linears):
                moved = linear(feat).index_select(0, graph._graph.src)
                part = torch.where((etypes == kind).unsqueeze(-1), moved, 0.0)
                messages = part if messages is None else messages + part
            assert messages is not None
            feat = self.gru(dgl_ops.reduce_edges(graph._graph, messages, "sum"), feat)
        return feat

    return forward
