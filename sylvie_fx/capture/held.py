"""Graphs that a module holds instead of being passed: found, and swapped for stand-ins while capturing.

DGL and PyG objects are known by the class they derive from, so that neither is imported here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sylvie_fx.capture.sparse_parts import is_adjacency

_REGISTRIES = ("_parameters", "_buffers")
_OF_THE_FRAMEWORK = frozenset(vars(nn.Module()))
_LIBRARIES = ("torch", "torch_geometric", "dgl")


class HeldKind(enum.Enum):
    """What a held graph is."""

    DGL_GRAPH = "DGLGraph"
    PYG_DATA = "PyG Data"
    ADJACENCY = "sparse adjacency"
    EDGE_INDEX = "edge_index"
    EDGE_PAIR = "(src, dst)"
    NODE_ROWS = "a row for each node"


@dataclass(frozen=True)
class HeldGraph:
    """One place in a module where a graph is kept.

    Attributes:
        path: The module's path in the model, ``""`` for the model itself.
        module: The module.
        attribute: The attribute's name.
        key: Index or key within the attribute where that is a list, tuple or dict, else ``None``.
        kind: What was found.
        value: The graph: a DGLGraph, a PyG Data, a sparse ``[N, N]`` tensor, an int64 ``[2, E]`` tensor, or a pair of
            int64 ``[E]`` tensors.
    """

    path: str
    module: nn.Module
    attribute: str
    key: Hashable | None
    kind: HeldKind
    value: Any

    def __str__(self) -> str:
        """Where it is kept, as the user would write it: ``model.conv.graphs[0]``."""
        place = f"model.{self.path}.{self.attribute}" if self.path else f"model.{self.attribute}"
        return place if self.key is None else f"{place}[{self.key!r}]"


def find_held(model: nn.Module) -> list[HeldGraph]:
    """Graphs among the attributes, buffers and parameters of every module, or one level down in a container of theirs.

    The same graph kept in several places is found at each of them. An int64 tensor of shape ``[2, E]`` counts as an
    edge_index, whatever the model means by it.

    Args:
        model: The unmodified model.

    Returns:
        In the order of ``model.named_modules()``, then of the attributes.
    """
    return [
        HeldGraph(path, module, attribute, key, kind, value)
        for path, module in model.named_modules()
        for attribute, kept in _attributes(module)
        for key, value in _opened(kept)
        if (kind := graph_kind(value)) is not None
    ]


def graph_kind(value: object) -> HeldKind | None:
    """What kind of graph ``value`` is, ``None`` if it is not one."""
    if _derives_from(value, "dgl", "DGLGraph"):
        return HeldKind.DGL_GRAPH
    if _derives_from(value, "torch_geometric", "BaseData"):
        return HeldKind.PYG_DATA
    if is_adjacency(value):
        return HeldKind.ADJACENCY
    if _is_index(value, 2) and value.shape[0] == 2:
        return HeldKind.EDGE_INDEX
    if isinstance(value, tuple) and len(value) == 2 and all(_is_index(v, 1) for v in value):
        return HeldKind.EDGE_PAIR if value[0].shape == value[1].shape else None
    return None


@contextmanager
def replaced(held: Sequence[HeldGraph], stand_ins: Sequence[object]) -> Iterator[None]:
    """Put a stand-in in the place of each held graph; put the graphs back on leaving, also after an error.

    A buffer or parameter becomes a plain attribute meanwhile, so that it may be replaced by something that is no
    tensor and is not lifted into an exported program. Containers (lists, tuples, dicts) are copied, never changed.

    Args:
        held: What :func:`find_held` returned, or a part of it.
        stand_ins: One for each.
    """
    undo: list[Callable[[], None]] = []
    try:
        for place, stand_in in zip(held, stand_ins, strict=True):
            module, name = place.module, place.attribute
            registry = next((r for r in map(vars(module).get, _REGISTRIES) if name in (r or ())), None)
            if registry is not None:
                undo.append(partial(_register_again, module, registry, name, registry[name], list(registry)))
                vars(module)[name] = registry.pop(name)
            else:
                undo.append(partial(vars(module).__setitem__, name, vars(module)[name]))
            kept = vars(module)[name]
            vars(module)[name] = stand_in if place.key is None else _with_item(kept, place.key, stand_in)
        yield
    finally:
        for restore in reversed(undo):
            restore()


def find_node_parameters(model: nn.Module, num_nodes: int) -> list[tuple[str, Tensor]]:
    """Parameters and buffers with one row per node, such as ``nn.Embedding(num_nodes, d)``.

    Layers of torch, PyG and DGL have none but embeddings: a weight of theirs with as many rows is a coincidence.

    Args:
        model: The unmodified model.
        num_nodes: ``N``, the number of nodes of the graph.

    Returns:
        ``(path, tensor)``, the tensor of shape ``[N, ...]``, each tensor once.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        of_a_library = type(module).__module__.split(".")[0] in _LIBRARIES
        if of_a_library and not isinstance(module, (nn.Embedding, nn.ParameterList, nn.ParameterDict)):
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.layout is not torch.strided or tensor.dim() == 0:
                continue
            if tensor.shape[0] == num_nodes:
                found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    return list(found.values())


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in _REGISTRIES:
            yield from value.items()
        elif name not in _OF_THE_FRAMEWORK:
            yield name, value


def _opened(kept: object) -> Iterator[tuple[Hashable | None, Any]]:
    """The value itself, or what it contains where it is a container that is no graph."""
    if graph_kind(kept) is not None or not isinstance(kept, (list, tuple, dict)):
        yield None, kept
    else:
        yield from kept.items() if isinstance(kept, dict) else enumerate(kept)


def _with_item(container: Any, key: Any, item: object) -> Any:
    if isinstance(container, tuple):
        items: list[Any] = [item if index == key else other for index, other in enumerate(container)]
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    copied = container.copy()
    copied[key] = item
    return copied


def _register_again(module: nn.Module, registry: dict[str, Any], name: str, value: object, order: list[str]) -> None:
    """Undo the removal of a buffer or parameter, in its old place among the others."""
    vars(module).pop(name, None)
    registry[name] = value
    for following in order[order.index(name) + 1 :]:
        if following in registry:
            registry[following] = registry.pop(following)


def _is_index(value: object, dim: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == dim


def _derives_from(value: object, package: str, name: str) -> bool:
    return any(c.__name__ == name and c.__module__.split(".")[0] == package for c in type(value).__mro__)
