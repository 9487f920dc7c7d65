"""What programs have taken from a model's attributes, and whether it still holds: part of a program's key."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from sylvie_fx.capture.state import Attribute, attributes, contents, of_a_library, same
from sylvie_fx.engine import Compiled

log = logging.getLogger(__name__)

_BAKED = (int, float, bool, str)
_MANY = 6
"""Values of one attribute from which on a warning says that each is captured anew."""


class Baked:
    """Attributes of one model that its programs depend on.

    Numbers, flags and strings are part of the key of a program. Of everything else that the forward pass read (functions,
    containers, tensors, class attributes) the state at the program's first call is kept; where it is another one now, the
    generation is, and the model is captured again.

    Attributes:
        generation: Part of the key; programs of another one hold other values.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.generation: Hashable = ()
        self._lineage: Hashable = ()
        self._copies, self._bumps = itertools.count(), itertools.count()
        self._seen: dict[Compiled, list[tuple[Attribute, dict[str, Any], str, Any]]] = {}
        self._keys: set[Hashable] = set()
        self._values: dict[Attribute, set[Hashable]] = defaultdict(set)
        self._warned = False

    def key(self, modules: Sequence[nn.Module]) -> Hashable:
        """What a program has baked in; the same on every rank that makes the same changes.

        Args:
            modules: All modules of the model.
        """
        numbers = tuple(tuple((n, type(v), v) for n, v in vars(m).items() if type(v) in _BAKED) for m in modules)
        key = (tuple(map(type, modules)), numbers)
        if key not in self._keys:
            self._keys.add(key)
            for (path, _), own in zip(self.model.named_modules(), numbers, strict=True):
                for name, _, value in own:
                    self._count((path, name), value)
        return (key, self.generation)

    def changed(self, compiled: Compiled) -> bool:
        """Whether something that a program has read is no longer as it was; if so, its generation has ended."""
        seen = self._seen.get(compiled)
        if seen is None:
            self._seen[compiled] = [held for attribute in compiled.captured.reads for held in self._held(attribute)]
            return False
        for attribute, held, name, value in seen:
            if not same(contents(held.get(name)), value):
                self.generation = (self._lineage, next(self._bumps))
                self._count(attribute, self.generation)
                return True
        return False

    def copied_from(self, other: Baked) -> None:
        """Share the programs of a model that this one's is a copy of; not where either may change what they have read."""
        self._lineage = ("copy", other._lineage, next(other._copies))  # never the generation of a model
        own = any(self._held((path, n)) for path, m in self.model.named_modules() for n in attributes(m))
        self.generation = self._lineage if own else other.generation

    def _held(self, attribute: Attribute) -> list[tuple[Attribute, dict[str, Any], str, Any]]:
        path, name = attribute
        module: Any = self.model
        for part in path.split(".") if path else ():
            module = vars(module)["_modules"][part]
        held: Any = vars(module)
        if name not in held:
            held = next((vars(c) for c in type(module).__mro__ if name in vars(c)), {})
            if not isinstance(held.get(name), (*_BAKED, list, tuple, dict, Tensor)) or of_a_library(
                held.get("__module__")
            ):
                return []
        else:
            plain = not (callable(held[name]) or isinstance(held[name], Tensor))
            if type(held[name]) in _BAKED or (plain and of_a_library(type(module).__module__)):
                return []
        return [(attribute, held, name, contents(held[name]))]

    def _count(self, attribute: Attribute, value: Hashable) -> None:
        values = self._values[attribute]
        values.add(value)
        if len(values) >= _MANY and not self._warned:
            self._warned = True
            log.warning(
                "the model has been captured for %d values of its attribute %s, which takes a moment each time: "
                "pass it to forward as a tensor, or register it as a buffer and write it in place",
                len(values), ".".join(filter(None, attribute)),
            )  # fmt: skip
