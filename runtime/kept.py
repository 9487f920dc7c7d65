"""Values of a program that are kept from one step to the next, and what is left to run where they are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from sylvie_fx.ir.program import meta
from sylvie_fx.ir.written import version
from sylvie_fx.runtime.recompute import Item, stretches


class KeptValues:
    """The values that ``keep-aggregations`` has marked.

    Args:
        graph: The main graph.
        recompute: Take stretches of it together, which are computed again in the backward pass.
    """

    def __init__(self, graph: fx.Graph, recompute: bool = False) -> None:
        nodes = list(graph.nodes)
        self._marked = frozenset(n for n in nodes if meta(n).kept)
        left_out: set[fx.Node] = set()
        for node in reversed(nodes):
            if node in self._marked or (node.users and all(user in left_out for user in node.users)):
                left_out.add(node)
        rest: list[Any] = [n for n in nodes if n not in left_out]
        whole, rest = (stretches(nodes), stretches(rest)) if recompute else (list(nodes), list(rest))
        self._whole, self._rest = (whole, last_uses(whole)), (rest, last_uses(rest))
        self._kept: dict[fx.Node, Tensor] = {}
        self._versions: list[int] = []
        self._new: dict[fx.Node, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._marked)

    @property
    def written(self) -> bool:
        """Whether a kept value was written into since it was kept."""
        return self._versions != [version(t) for t in self._kept.values()]

    def forget(self) -> None:
        """Compute all of them again at the next step."""
        self._kept, self._versions = {}, []

    def begin(self) -> tuple[dict[fx.Node, Any], list[Item], dict[Item, list[fx.Node]]]:
        """The values at hand at the start of a step, the nodes to run, and what each of them is the last to read."""
        self._new = {}
        return dict(self._kept), *(self._rest if self._kept else self._whole)

    def note(self, node: fx.Node, value: Any) -> None:
        """A value of this step; a marked one is kept once the step has come to its end."""
        if node in self._marked:
            self._new[node] = value

    def end(self, results: Sequence[Any]) -> list[Any]:
        """The results of a step; those that lie in the memory of a kept value are copied, for a user may write there."""
        if self._new:
            self._kept = self._new
            self._versions = [version(t) for t in self._kept.values()]
        memory = {t.untyped_storage().data_ptr() for t in self._kept.values()}
        return [
            r.clone() if isinstance(r, Tensor) and memory and r.untyped_storage().data_ptr() in memory else r
            for r in results
        ]


def last_uses(nodes: Sequence[Item]) -> dict[Item, list[fx.Node]]:
    """Node to the values that nothing reads after it."""
    last: dict[Item, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                last.setdefault(node, []).append(used)
    return last
