"""Sparse adjacencies: a stand-in that an unmodified model can use while it is captured.

    with patched_sparse():
        adj = stand_in_adjacency(row, col, value, marker.shape[0], torch.sparse_csr)
        model(x, adj)

exports ``adj @ x`` and its many spellings as a gather, a multiplication and a scatter. :func:`adjacency_parts` takes
the real matrix apart into ``row``, ``col`` and ``value``.
"""

from sylvie_fx.capture import sparse_ops, sparse_products
from sylvie_fx.capture.sparse_parts import AdjacencyParts, adjacency_parts, is_adjacency, rebuild_adjacency
from sylvie_fx.capture.sparse_patches import patched_sparse
from sylvie_fx.capture.sparse_tensor import StandInAdjacency, stand_in_adjacency

__all__ = [
    "AdjacencyParts",
    "StandInAdjacency",
    "adjacency_parts",
    "is_adjacency",
    "patched_sparse",
    "rebuild_adjacency",
    "sparse_ops",
    "sparse_products",
    "stand_in_adjacency",
]
