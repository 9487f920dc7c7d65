"""Made-up graphs with the sizes and shapes that tests and benchmarks ask for; one seed, one graph."""

from __future__ import annotations

import torch
from torch import Tensor

from sylvie_fx.graphs.datasets import GraphData, random_masks, undirected


def random_graph(nodes: int, edges: int, features: int = 16, classes: int = 4, seed: int = 0) -> GraphData:
    """Edges between uniformly random ends, self loops and parallel edges included; normal features, random classes.

    Args:
        nodes: Number of nodes.
        edges: Number of directed edges, exactly.
        features: Columns of x.
        classes: Number of classes.
        seed: Decides everything.
    """
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes, (2, edges), generator=generator)
    return _dress(f"random({nodes},{edges})", edge_index, nodes, features, classes, seed, generator)


def power_law_graph(
    nodes: int, edges: int, features: int = 16, classes: int = 4, seed: int = 0, exponent: float = 2.5
) -> GraphData:
    """Ends drawn with weights whose degrees follow a power law (Chung-Lu): few hubs, many leaves, isolated nodes.

    Args:
        nodes: Number of nodes; a hub has no special id.
        edges: Undirected edges drawn; both directions are kept once, so there are fewer than twice as many.
        features: Columns of x.
        classes: Number of classes.
        seed: Decides everything.
        exponent: Of the degree distribution, above 2; smaller is more uneven.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, nodes + 1, dtype=torch.float64) ** (-1.0 / (exponent - 1.0))
    # Searching the cumulated weights has no limit on the number of nodes, which torch.multinomial has.
    cumulated = (weights / weights.sum()).cumsum(0)
    drawn = torch.searchsorted(cumulated, torch.rand(2, edges, generator=generator, dtype=torch.float64))
    ends = torch.randperm(nodes, generator=generator)[drawn.clamp(max=nodes - 1)]
    return _dress(f"power_law({nodes})", undirected(ends, nodes), nodes, features, classes, seed, generator)


def grid_graph(rows: int, columns: int, features: int = 16, classes: int = 4, seed: int = 0) -> GraphData:
    """Each node joined with its neighbours left, right, above and below.

    Args:
        rows: Height; node (i, j) has id i * columns + j.
        columns: Width.
        features: Columns of x.
        classes: Number of classes.
        seed: Decides features, classes and masks.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(rows * columns).reshape(rows, columns)
    across = torch.stack([ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1)])
    down = torch.stack([ids[:-1].reshape(-1), ids[1:].reshape(-1)])
    edge_index = undirected(torch.cat([across, down], 1), rows * columns)
    return _dress(f"grid({rows}x{columns})", edge_index, rows * columns, features, classes, seed, generator)


def block_model(
    nodes: int = 4000,
    classes: int = 12,
    degree: float = 14.0,
    homophily: float = 0.3,
    features: int = 32,
    noise: float = 3.5,
    seed: int = 0,
) -> GraphData:
    """The contextual block model: weak features and weak communities, so that accuracy needs both.

    Args:
        nodes: Number of nodes.
        classes: Number of classes, drawn uniformly.
        degree: Mean degree before the few parallel edges are dropped.
        homophily: Share of edges inside a class; the others join two classes.
        features: Columns of x: the normal mean vector of the class plus noise.
        noise: Standard deviation of the noise around it, per column.
        seed: Decides everything.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (nodes,), generator=generator)
    count = round(nodes * degree / 2)
    src = torch.randint(nodes, (count,), generator=generator)
    shift = torch.randint(1, max(classes, 2), (count,), generator=generator)
    inside = torch.rand(count, generator=generator) < homophily
    wanted = torch.where(inside, y[src], (y[src] + shift) % classes)
    by_class = torch.argsort(y, stable=True)
    sizes = torch.bincount(y, minlength=classes)
    starts = sizes.cumsum(0) - sizes
    # A class without nodes has no partner to offer: such an edge becomes a self loop, and is dropped.
    place = (torch.rand(count, generator=generator) * sizes[wanted]).long().clamp(max=nodes - 1)
    dst = torch.where(sizes[wanted] > 0, by_class[(starts[wanted] + place).clamp(max=nodes - 1)], src)
    means = torch.randn(classes, features, generator=generator)
    x = means[y] + noise * torch.randn(nodes, features, generator=generator)
    edge_index = undirected(torch.stack([src, dst]), nodes)
    return GraphData(f"block_model({nodes})", x, y, edge_index, *random_masks(nodes, seed), num_classes=classes)


def _dress(
    name: str, edge_index: Tensor, nodes: int, features: int, classes: int, seed: int, generator: torch.Generator
) -> GraphData:
    """Normal features, uniform classes and random masks on a graph."""
    x = torch.randn(nodes, features, generator=generator)
    y = torch.randint(classes, (nodes,), generator=generator)
    return GraphData(name, x, y, edge_index, *random_masks(nodes, seed), num_classes=classes)
