"""The frontends whose objects a call may contain; those of a framework only once the framework is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sylvie_fx.capture.inputs import Frontend
from sylvie_fx.sharding.pyg import DataFrontend
from sylvie_fx.sharding.sparse import SparseFrontend


def frontends() -> Sequence[Frontend]:
    """Frontends for what can be in a call."""
    found: list[Frontend] = [SparseFrontend()]
    if "torch_geometric" in sys.modules:
        found.append(DataFrontend())
    if "dgl" in sys.modules:
        from sylvie_fx.sharding.dgl import GraphFrontend

        found.append(GraphFrontend())
    return found
