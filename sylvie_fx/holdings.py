"""What a model holds of the graph: graphs among its attributes, and tables with a row for each node."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sylvie_fx.capture.held import HeldGraph, HeldKind, find_held, find_node_parameters, replaced
from sylvie_fx.capture.state import Watch
from sylvie_fx.engine import Engine
from sylvie_fx.graphs.sharded import ShardedGraph
from sylvie_fx.ir.errors import CaptureError
from sylvie_fx.ir.placement import NODES
from sylvie_fx.leaves import Sharding
from sylvie_fx.node_tensor import NodeTensor, node_tensor
from sylvie_fx.runtime.exchange import SyncGradients, apply

_STAND_INS = "_held_by_the_model"
METHOD = "_method_of_the_model"
"""The keyword argument of a call that names the method which is called, where it is not forward."""


class Holdings:
    """The graphs and node tables of one model, and their sharded counterparts.

    Attributes:
        graphs: The places where graphs are held.
        lifting: Whether tables with a row for each node are node rows in the program, instead of parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.graphs = find_held(model)
        self.lifting = False
        self._sharded: dict[str, Any] = {}
        self._graph: ShardedGraph | None = None

    def refresh(self) -> None:
        """Look again at what the model holds now."""
        self.graphs = find_held(self.model)

    def adopt(self, sharded: dict[str, Any], graph: ShardedGraph) -> None:
        """Take over what ``shard`` made.

        Args:
            sharded: Counterparts of the held graphs by place.
            graph: The graph whose rows they are.
        """
        self._sharded.update(sharded)
        self._graph = graph
        self.lifting = bool(self.tables())

    def copy_from(self, other: Holdings) -> None:
        """Take over the sharded counterparts of a model that this one is a copy of."""
        self._sharded, self._graph, self.lifting = dict(other._sharded), other._graph, other.lifting

    @property
    def graph(self) -> ShardedGraph | None:
        """The graph of the last ``shard``."""
        return self._graph

    def table_sizes(self) -> set[int]:
        """Rows of every parameter and buffer that may have a row for each node."""
        tensors = [t for m in self.model.modules() for t in (*m._parameters.values(), *m._buffers.values())]
        sizes = {t.shape[0] for t in tensors if t is not None and t.dim()}
        return {size for size in sizes if find_node_parameters(self.model, size)}

    def tables(self, model: nn.Module | None = None) -> list[HeldGraph]:
        """Every place of a parameter or buffer with a row for each node, but for graphs."""
        if self._graph is None:
            return []
        model = model or self.model
        graphs = {id(h.value) for h in find_held(model)}
        wanted = {id(t) for _, t in find_node_parameters(model, self._graph.num_nodes)} - graphs
        return [
            HeldGraph(path, module, name, None, HeldKind.NODE_ROWS, tensor)
            for path, module in model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if id(tensor) in wanted
        ]

    def arguments(self, engine: Engine, step: int) -> dict[str, Any]:
        """What a call gets besides the user's arguments.

        Raises:
            CaptureError: A held graph is not sharded, or is another one by now.
        """
        if not self.graphs and not self.lifting:
            return {}
        missing = [str(h) for h in self.graphs if str(h) not in self._sharded]
        changed = [str(h) for h in self.graphs if not _same(_current(h), h.value)]
        if changed:
            raise CaptureError(
                f"{', '.join(changed)} holds another graph than the one that was sharded",
                remedy="call model.shard(...) again",
            )
        if missing:
            raise CaptureError(
                f"{', '.join(missing)} holds a graph that is not sharded",
                remedy="call data = model.shard(...) on the node data first: it shards the held graph too",
            )
        rows = [_own_rows(h, self._graph, engine, step) for h in self.tables()] if self.lifting and self._graph else []
        return {_STAND_INS: [*[self._sharded[str(h)] for h in self.graphs], *rows]}

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], watch: Watch) -> Any:
        """Call the model with stand-ins in the place of what it holds."""
        stand_ins: Sequence[Any] | None = kwargs.pop(_STAND_INS, None)
        method: str = kwargs.pop(METHOD, "")
        if stand_ins is None:
            return watch.call(model, args, kwargs, method)
        places = [*find_held(model), *(self.tables(model) if self.lifting else [])]
        with replaced(places, stand_ins):
            return watch.call(model, args, kwargs, method)


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy that shares the graphs which the model holds: they are not changed, and some can not be copied."""
    memo = {} if memo is None else memo
    memo.update({id(h.value): h.value for h in find_held(model)})
    return copy.deepcopy(model, memo)


def _current(held: HeldGraph) -> Any:
    kept = getattr(held.module, held.attribute)
    return kept if held.key is None else kept[held.key]


def _same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    tensors = isinstance(now, Tensor) and isinstance(then, Tensor)
    return bool(tensors and now.layout is then.layout is torch.strided and torch.equal(now.cpu(), then.cpu()))


def _own_rows(table: HeldGraph, graph: ShardedGraph, engine: Engine, step: int) -> NodeTensor:
    """This rank's rows of a replicated table; its gradient is the sum over ranks."""
    whole: Tensor = table.value
    if whole.requires_grad and torch.is_grad_enabled():
        (whole,) = apply(SyncGradients, engine.transport, f"{table} step {step}", whole)
    space = graph.spaces[NODES]
    rows = space.layout.rows(engine.transport.rank).to(whole.device)
    return node_tensor(whole.index_select(0, rows), Sharding(graph, space), engine)
