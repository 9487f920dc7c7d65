"""A user's script as a value: the model, the data and the loss that its ``build()`` makes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from sylvie_fx.ir.errors import OptionError

_CONVENTION = "define `def build(): return model, (data, ...), loss_or_None` beside main()"


class Script(NamedTuple):
    """What a script builds.

    Attributes:
        model: The one-device model.
        data: Its positional inputs.
        loss: Called with the model's output, or None where the output is the loss or has none.
    """

    model: nn.Module
    data: tuple[Any, ...]
    loss: Callable[..., Any] | None


def load_script(path: str | os.PathLike[str]) -> Script:
    """Import a script, without running its ``main()``, and call its ``build()``.

    Args:
        path: A Python file with a function ``build() -> (model, data tuple, loss or None)`` at module level. Modules
            beside it can be imported by it.

    Raises:
        OptionError: There is no such file, it has no ``build``, or that returns something else.
        Exception: Whatever the script raises.
    """
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"there is no script {file}")
    spec = importlib.util.spec_from_file_location("sylvie_fx_user_script", file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        # Data classes and pickles of the script look their module up by its name.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        build = getattr(module, "build", None)
        if not callable(build):
            raise OptionError(f"{file} has no function build()", remedy=_CONVENTION)
        built = build()
    finally:
        sys.path.remove(folder)
    return _checked(built, file)


def _checked(built: Any, file: Path) -> Script:
    if not isinstance(built, tuple) or len(built) != 3:
        kind = f"a tuple of {len(built)}" if isinstance(built, tuple) else f"a {type(built).__name__}"
        raise OptionError(f"build() of {file} returns {kind}", remedy=_CONVENTION)
    model, data, loss = built
    if not isinstance(model, nn.Module):
        raise OptionError(f"build() of {file} returns a {type(model).__name__} as its model", remedy=_CONVENTION)
    if not isinstance(data, tuple):
        raise OptionError(f"build() of {file} returns a {type(data).__name__} as its data", remedy=_CONVENTION)
    if loss is not None and not callable(loss):
        raise OptionError(f"build() of {file} returns a {type(loss).__name__} as its loss", remedy=_CONVENTION)
    return Script(model, data, loss)
