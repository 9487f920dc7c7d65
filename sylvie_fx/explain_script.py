"""What a script's model would exchange: compiled and run for one step on simulated ranks, without training."""

from __future__ import annotations

import os
from typing import Any

from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.holdings import copy_model
from sylvie_fx.ir.options import Options
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport
from sylvie_fx.script import load_script


def explain_script(path: str | os.PathLike[str], *, parts: int = 2, program: bool = False, **options: Any) -> str:
    """The table of exchanges of a script's ``build()`` on ``parts`` ranks, as rank 0 sees it.

    Args:
        path: The script.
        parts: Number of simulated ranks.
        program: Append the rewritten program.
        **options: Fields of :class:`Options`.

    Raises:
        SylvieError: The script has no ``build()``, or its model is refused.
    """
    script, chosen, cache = load_script(path), Options(**options), ProgramCache()

    def rank(transport: Transport) -> str:
        net = DistributedModule(copy_model(script.model), chosen, default_passes(), transport, cache)
        data = net.shard(*script.data)
        data = data if len(script.data) > 1 else (data,)
        (script.loss or (lambda model, *inputs: model(*inputs)))(net, *data)
        mode = "train" if net.training else "eval"
        return net.explain(mode) + (str(net.program(mode)) if program else "")

    return str(run_ranks(parts, rank, chosen.timeout)[0])
