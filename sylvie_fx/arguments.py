"""What distribute() is given: the model and the options, looked at before anything is made of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sylvie_fx.ir.errors import OptionError


def check_model(model: nn.Module) -> None:
    """Refuse what can not be captured at all, whatever the data.

    Raises:
        OptionError: It is distributed, compiled or wrapped already, or has parameters without a shape.
    """
    from sylvie_fx.api import DistributedModule

    if isinstance(model, DistributedModule):
        raise OptionError("the model is distributed already", remedy="call distribute() once, on the original model")
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            remedy="put the function into forward of a module",
        )
    for path, module in model.named_modules():
        at = f" ({path})" if path else ""
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise OptionError(
                f"the model is the result of torch.compile{at}", why="sylvie_fx captures the Python code of the model itself",
                remedy="give distribute() the model that is not compiled (compiled._orig_mod)",
            )  # fmt: skip
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise OptionError(
                f"the model is wrapped in {type(module).__name__}{at}", why="gradients would be averaged over ranks once more",
                remedy="give distribute() the model inside (wrapped.module)",
            )  # fmt: skip
        if isinstance(module, torch.jit.ScriptModule):
            raise OptionError(
                f"the model is the result of torch.jit.script or trace{at}", why="sylvie_fx captures the Python code of the model itself",
                remedy="give distribute() the model that is not scripted",
            )  # fmt: skip
    lazy = [name for name, p in [*model.named_parameters(), *model.named_buffers()] if nn.parameter.is_lazy(p)]
    if lazy:
        raise OptionError(
            f"{', '.join(lazy)} has no shape yet", why="lazy modules make their parameters at the first call",
            remedy="call the model once on data of one device, under torch.no_grad(), before distribute()",
        )  # fmt: skip


def options_from_environment() -> dict[str, Any]:
    """Options that variables give."""
    found: dict[str, Any] = {}
    for name, read in _VARIABLES.items():
        text = os.environ.get(f"SYLVIE_FX_{name.upper()}")
        if text:
            try:
                found[name] = read(text)
            except ValueError:
                raise OptionError(f"SYLVIE_FX_{name.upper()}={text!r}", remedy="give a number") from None
    return found


_VARIABLES: dict[str, Callable[[str], Any]] = {
    "bits": lambda text: text if text == "auto" else int(text),
    "staleness": lambda text: text if text == "auto" else int(text),
    "timeout": float,
}
