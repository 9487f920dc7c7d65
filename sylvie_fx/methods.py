"""Methods of a model other than forward: called on sharded tensors, they are programs of their own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Hashable
from functools import wraps
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sylvie_fx.capture.inputs import flatten_call
from sylvie_fx.holdings import METHOD, Holdings
from sylvie_fx.ir.errors import CaptureError, CommError, PassError, SylvieError
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.sharding import frontends

log = logging.getLogger(__name__)

Prepare: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Callable[[], Any]]
"""Captures a call; what it returns runs it."""


def is_own(model: nn.Module, name: str) -> bool:
    """Whether a name is that of a public method that the model's class adds to those of every module, and that returns."""
    if name.startswith("_") or hasattr(nn.Module, name) or name in vars(model):
        return False
    found = inspect.getattr_static(type(model), name, None)
    function = found.__func__ if isinstance(found, staticmethod) else found
    later = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)
    return isinstance(function, FunctionType) and not later


class Methods:
    """Runs methods of one model on sharded tensors, as forward is run.

    A method that can not be captured as a whole, one that trains the model say, runs operator by operator: each is then a
    line outside the model.

    Args:
        model: The original module.
        holdings: What it holds of the graph.

    Attributes:
        refused: The methods that run operator by operator, and why.
    """

    def __init__(self, model: nn.Module, holdings: Holdings) -> None:
        self._model, self._holdings = model, holdings
        self._errors: dict[Hashable, SylvieError] = {}
        self.refused: dict[str, SylvieError] = {}

    def wrapped(self, name: str, prepare: Prepare, telling: Callable[[Callable[[], Any]], Any]) -> Callable[..., Any]:
        """A method, to be called on sharded tensors; on others it is called as it is.

        Args:
            name: Of the method.
            prepare: Captures a call from its arguments and keyword arguments.
            telling: Runs it, and tells the other ranks of an error.
        """
        method = getattr(self._model, name)

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = flatten_call(args, kwargs, frontends()).leaves
            if not any(isinstance(t, NodeTensor) for _, t in leaves):
                return method(*args, **kwargs)
            given, structure = pytree.tree_flatten((args, kwargs))
            # Not the values of numbers: a method that takes the epoch would be tried anew in each.
            key = (name, self._model.training, torch.is_grad_enabled(), tuple(type(v) for v in given), structure)
            run = telling(lambda: self._prepared(name, key, lambda: prepare(args, kwargs | {METHOD: name})))
            if run is not None:
                return telling(run)
            try:
                return method(*args, **kwargs)
            except CommError:
                raise
            except SylvieError as error:
                whole = self._errors.pop(key)  # tried anew in the next call: this one's arguments may be the reason
                self.refused.pop(name, None)
                if whole.remedy:  # of the method, not of a line in it
                    raise whole from error
                raise error from whole

        return call

    def _prepared(self, name: str, key: Hashable, prepare: Callable[[], Callable[[], Any]]) -> Callable[[], Any] | None:
        """What runs the program of a call; None where it is known to be none."""
        if key in self._errors:
            return None
        lifting = self._holdings.lifting
        try:
            return prepare()
        except (CaptureError, PassError) as error:
            self._holdings.lifting = lifting
            told = type(error)(
                f"the method {name} is no program: {error.what}", where=error.where, why=error.why, remedy=error.remedy
            )
            self._errors[key] = self.refused[name] = told
            log.warning("%s runs operator by operator, which sends more bytes: %s", name, error)
            return None
