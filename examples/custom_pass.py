"""A pass of your own: note at every exchange how many numbers a row carries, and refuse programs that carry too many.

It is given to distribute() behind a pass of the default pipeline, and its program can be inspected like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import sylvie_fx
from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import PassError
from sylvie_fx.ir.program import Program, meta, shape


@dataclass(frozen=True)
class LimitHalo(sylvie_fx.Pass):
    """Refuse programs whose halo rows are wider than a limit.

    Requires: insert-halo.
    Ensures: no exchange carries more than ``columns`` numbers a row.
    """

    name: ClassVar[str] = "limit-halo"
    columns: int = 64

    def run(self, program: Program, context: sylvie_fx.PassContext) -> Program:
        for node in program.graph.nodes:
            if node.target is not ops.halo_exchange:
                continue
            width = math.prod(int(s) for s in shape(node) if not s.free_symbols)
            if width > self.columns:
                raise PassError(
                    f"{node.args[0]} carries {width} numbers a row",
                    where=meta(node).where,
                    why=f"the limit is {self.columns}",
                    remedy="put a narrow linear layer in front of the aggregation",
                )
        return program


class Sum(nn.Module):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, hidden)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])


def main() -> None:
    passes = sylvie_fx.default_passes().insert_after("place-halos", LimitHalo(columns=128))
    model = sylvie_fx.distribute(Sum(32, 16), passes=passes)
    x, edge_index = model.shard(torch.randn(100, 32), torch.randint(100, (2, 600)))
    model(x, edge_index).sum().backward()
    for snapshot in model.snapshots:
        print(f"{snapshot.name:18} {'changed' if snapshot.changed else 'unchanged'}")
    print(model.program("train"))


if __name__ == "__main__":
    main()
