"""The operator that a capture leaves behind each decided Python branch; passes turn it into a check on the real graph."""

from __future__ import annotations

import torch
import torch.fx.node
from torch import Tensor

_library = torch.library.Library("sylvie", "FRAGMENT")  # keeps the registration alive for the life of the process


def _decided(condition: Tensor, answer: str) -> None:
    """Nothing where a program runs: split-prologue checks the condition on the real graph, or refuses it."""


_library.define("decided(Tensor condition, str answer) -> ()")
_library.impl("decided", _decided, "CompositeExplicitAutograd")
torch.library.register_fake("sylvie::decided", _decided, lib=_library)

decided = torch.fx.node.has_side_effect(torch.ops.sylvie.decided.default)
