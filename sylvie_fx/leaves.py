"""The tensors of a call: what they are rows of, how a program names them, and a few rows of them for the capture."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sylvie_fx.graphs.sharded import ShardedGraph, Space, space_name
from sylvie_fx.ir.errors import CaptureError
from sylvie_fx.ir.placement import REPLICATED, Placement, Rows


@dataclass(eq=False)
class Sharding:
    """What a sharded tensor is part of.

    Attributes:
        graph: The sharded graph.
        space: The space whose rows it holds.
        dim: The dimension that carries them.
        whole: The global tensor, where it is part of the graph's structure (indices, masks, types, fixed edge data).
        index: The values name nodes.
        given: It is the graph's structure itself, as ``shard`` was given it.
        picked: Where it is a mask or a list of ids: local positions and the space of the rows it picks, once known.
    """

    graph: ShardedGraph
    space: Space
    dim: int = 0
    whole: Tensor | None = None
    index: bool = False
    given: bool = False
    picked: tuple[Tensor, Space] | None = None


@dataclass(frozen=True)
class Leaf:
    """One tensor of a call: this rank's rows, and what they are rows of (None: the same on every rank)."""

    path: str
    local: Tensor
    sharding: Sharding | None


def is_static(leaf: Leaf) -> bool:
    """Whether a tensor is part of the graph's structure: indices, masks, integer data; edge data without gradient."""
    sharding = leaf.sharding
    if sharding is None or sharding.whole is None:
        return False
    if not leaf.local.dtype.is_floating_point:
        return True
    return sharding.space is not sharding.graph.spaces["N"] and not leaf.local.requires_grad


def graph_of(leaves: Sequence[Leaf]) -> ShardedGraph:
    """The one graph that the tensors of a call belong to.

    Raises:
        CaptureError: No tensor is sharded, or they come from different graphs.
    """
    graphs = list(dict.fromkeys(leaf.sharding.graph for leaf in leaves if leaf.sharding is not None))
    if not graphs:
        raise CaptureError(
            "no argument of the call is sharded",
            why="a distributed model runs on this rank's rows",
            remedy="pass what model.shard(...) returned",
        )
    if len(graphs) > 1:
        raise CaptureError(
            "the arguments come from different calls of shard",
            remedy="shard everything that belongs to one graph in one call",
        )
    return graphs[0]


def spaces_of(leaves: Sequence[Leaf]) -> list[Space]:
    """The row spaces of a call: the nodes, and every space that an argument has rows of."""
    graph = graph_of(leaves)
    return list(
        dict.fromkeys([graph.spaces["N"], *(leaf.sharding.space for leaf in leaves if leaf.sharding is not None)])
    )


def names_of(spaces: Sequence[Space]) -> dict[Space, str]:
    """Names by the place in the call, so that calls on other masks or lists of ids find the same program."""
    names: dict[Space, str] = {}
    for space in spaces:
        names[space] = space_name(space.prefix, names.values())
    return names


def entry_placement(leaf: Leaf, names: Mapping[Space, str]) -> Placement:
    """Where a tensor enters the program."""
    return REPLICATED if leaf.sharding is None else Rows(names[leaf.sharding.space], leaf.sharding.dim)


def leaf_key(leaf: Leaf, names: Mapping[Space, str]) -> Hashable:
    """What a program depends on of a tensor; on its gradient too, for what is aggregated without one is kept."""
    local, sharding = leaf.local, leaf.sharding
    if sharding is None:
        return (leaf.path, local.dtype, local.shape, local.device, local.requires_grad)
    shape = local.shape
    rest = (*shape[: sharding.dim], *shape[sharding.dim + 1 :])
    where = names[sharding.space], sharding.dim, is_static(leaf)
    return (leaf.path, local.dtype, rest, *where, local.device, local.requires_grad)


def unique_name(name: str, used: set[str]) -> str:
    """A name that is free, taken from now on."""
    if name[0].isdigit():
        name = f"x_{name}"
    base, number = name, 0
    while name in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name)
    return name


def sample_of(leaf: Leaf, sizes: Mapping[str, int], names: Mapping[Space, str]) -> Tensor:
    """A few rows in the place of the tensor: real values, repeated or cut to the capture's size, indices in range."""
    if leaf.sharding is None:
        return leaf.local.detach().requires_grad_(leaf.local.requires_grad)
    dim, size = leaf.sharding.dim, sizes[names[leaf.sharding.space]]
    source = leaf.sharding.whole if leaf.sharding.whole is not None else leaf.local.detach()
    have = source.shape[dim]
    if have == 0:
        shape = list(source.shape)
        shape[dim] = size
        return source.new_zeros(shape, device=leaf.local.device).requires_grad_(leaf.local.requires_grad)
    sample = source.detach().index_select(dim, torch.arange(size, device=source.device) % have).to(leaf.local.device)
    if leaf.sharding.index:
        sample = sample % sizes["N"]
    return sample.requires_grad_(leaf.local.requires_grad)
