"""Which values share a layout: union-find over row-local operators, and the choice of each component's layout."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from sylvie_fx.ir.placement import NODES, Component, Layout
from sylvie_fx.ir.program import Program


@dataclass
class Components:
    """Provisional components while placements are inferred. Provisional numbers are negative; 0 is the entry layout."""

    parent: dict[int, int] = field(default_factory=dict)
    space: dict[int, str] = field(default_factory=dict)
    scatters: list[tuple[int, str, int, str]] = field(default_factory=list)
    gathers: list[tuple[int, str, int, str]] = field(default_factory=list)
    joins: list[tuple[int, list[int]]] = field(default_factory=list)

    def new(self, space: str) -> int:
        """A component for values of a space: always the same one for nodes."""
        if space == NODES:
            return 0
        number = -(len(self.parent) + 1)
        self.parent[number] = number
        self.space[number] = space
        return number

    def find(self, number: int) -> int:
        """The representative of a component."""
        if number >= 0:
            return number
        while self.parent[number] != number:
            number = self.parent[number]
        return number

    def space_of(self, number: int) -> str:
        """The space of a representative."""
        return self.space[number] if number else NODES

    def union(self, a: int, b: int) -> int:
        """Let two components of one space be one."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[min(a, b)] = max(a, b)
        return self.find(a)

    def settle(self, program: Program) -> dict[int, int]:
        """Choose layouts: by the index that values are scattered by, else as part of a join, else by a gather's index.

        Returns:
            Provisional representative to final component number.
        """
        roots = sorted({self.find(n) for n in self.parent}, reverse=True)
        final = {root: i + 1 + max(program.components, default=0) for i, root in enumerate(roots)}
        final[0] = 0
        part_of: dict[int, tuple[int, list[int], int]] = {}
        joined: dict[int, list[int]] = {}
        for whole, parts in self.joins:
            joined.setdefault(self.find(whole), [self.find(p) for p in parts])
            for position, part in enumerate(parts):
                part_of.setdefault(self.find(part), (self.find(whole), parts, position))
        busy: set[int] = set()
        done: dict[int, Layout] = {}

        def votes(uses: list[tuple[int, str, int, str]], root: int) -> list[tuple[str, int, str]]:
            counted = Counter(
                (index, self.find(into), space) for number, index, into, space in uses if self.find(number) == root
            )
            # Indices into rows as they enter first: their owners are known without another layout.
            return sorted(counted, key=lambda k: (k[1] != 0, -counted[k]))

        def layout(root: int) -> Layout:
            if root == 0:
                return Layout("entry")
            if root in done:
                return done[root]
            if root in busy:
                return Layout("blocks")
            busy.add(root)
            chosen = None
            for index, into, space in votes(self.scatters, root):
                if into == 0 or layout(into).kind != "blocks":
                    chosen = Layout("by", index=index, target=final[into], target_space=space)
                    break
            if chosen is None and root in part_of:
                whole, parts, position = part_of[root]
                if votes(self.scatters, whole):
                    meant = (whole, *(self.find(p) for p in parts))
                    chosen = Layout(
                        "slice", parts=tuple((final[p], self.space_of(p)) for p in meant), position=position
                    )
            if chosen is None and root in joined:
                chosen = Layout("concat", parts=tuple((final[p], self.space_of(p)) for p in joined[root]))
            if chosen is None:
                for index, into, space in votes(self.gathers, root):
                    if into == 0 or layout(into).kind != "blocks":
                        chosen = Layout("by", index=index, target=final[into], target_space=space)
                        break
            if chosen is None:
                entry = any(getattr(i.rows, "space", None) == self.space[root] for i in program.inputs)
                chosen = Layout("entry" if entry else "blocks")
            busy.discard(root)
            done[root] = chosen
            return chosen

        same: dict[tuple[str, Layout], int] = {}
        renumbered = {0: 0}
        for root in roots:
            chosen = layout(root)
            renumbered[final[root]] = (
                0 if chosen.kind == "entry" else same.setdefault((self.space[root], chosen), final[root])
            )
        for (space, chosen), number in same.items():
            target = None if chosen.target is None else renumbered[chosen.target]
            merged = tuple((renumbered[p], of) for p, of in chosen.parts)
            program.components[number] = Component(number, space, replace(chosen, target=target, parts=merged))
        return {root: renumbered[number] for root, number in final.items()}
