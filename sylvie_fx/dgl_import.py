"""Makes ``import dgl`` work beside a modern torch and setuptools, and does nothing where it works by itself.

The published DGL wheels (1.1.3, 2.1.0) import modules that no longer exist or that they need only for parts which a
full-graph model never touches. A finder waits for the first ``import dgl``, lends what is missing for the time of that
import, and takes it back afterwards, so that no other library sees a module that is not really there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_OPTIONAL = ("pandas", "pydantic", "yaml")
_GRAPHBOLT = "dgl.graphbolt"


def install_import_shim() -> None:
    """Arrange that the first ``import dgl`` succeeds; imports nothing itself, and is harmless to call again."""
    if "dgl" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Answers for ``dgl`` once, with its own spec and a loader that lends the missing modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "dgl":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("dgl")
        if spec is None:
            sys.meta_path.insert(0, self)
            return None
        if spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The package's own loader, with the missing modules in place while it runs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader
        lent = _missing_modules(spec)
        sys.modules.update(lent)
        try:
            self._loader.exec_module(module)
        except BaseException:
            lent.pop(_GRAPHBOLT, None)
            sys.modules.pop(_GRAPHBOLT, None)
            sys.meta_path.insert(0, _Finder())
            raise
        finally:
            for name, stand_in in lent.items():
                if name != _GRAPHBOLT and sys.modules.get(name) is stand_in:
                    del sys.modules[name]
        if _GRAPHBOLT in lent:
            module.graphbolt = lent[_GRAPHBOLT]  # type: ignore[attr-defined]


def _missing_modules(spec: ModuleSpec | None) -> dict[str, ModuleType]:
    """Stand-ins, by name, for what ``dgl`` imports and this environment has not."""
    lent: dict[str, ModuleType] = {}
    if not _exists("setuptools.extern") and _exists("packaging"):
        lent.update(_setuptools_extern())
    for name in _OPTIONAL:
        if not _exists(name):
            lent[name] = _StandIn(name, f"{name} is not installed; DGL needs it for this")
    if spec is not None and spec.origin is not None and not _graphbolt_works(Path(spec.origin).parent):
        lent[_GRAPHBOLT] = _StandIn(_GRAPHBOLT, "GraphBolt, DGL's sampler, has no build for this version of torch")
    return lent


def _exists(name: str) -> bool:
    if name in sys.modules:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _setuptools_extern() -> dict[str, ModuleType]:
    """``setuptools.extern.packaging``, gone since setuptools 70, as a door to ``packaging`` itself."""
    import packaging
    import packaging.version

    parents = {} if _exists("setuptools") else {"setuptools": _StandIn("setuptools", "setuptools is not installed")}
    extern = ModuleType("setuptools.extern")
    extern.__path__ = []
    extern.packaging = packaging  # type: ignore[attr-defined]
    return {
        **parents,
        "setuptools.extern": extern,
        "setuptools.extern.packaging": packaging,
        "setuptools.extern.packaging.version": packaging.version,
    }


def _graphbolt_works(package: Path) -> bool:
    """Whether this DGL has no GraphBolt, or one that this torch can load."""
    folder = package / "graphbolt"
    if not folder.is_dir():
        return True
    import torch

    version = torch.__version__.split("+", maxsplit=1)[0]
    return any(folder.glob(f"*graphbolt_pytorch_{version}.*")) and _exists("torchdata.datapipes")


class _StandIn(ModuleType):
    """A module that can be imported, subclassed from and decorated with, and that raises when it is really used."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = f"{self.__name__}.{name}: {self._reason}"

        def unavailable(self: object, *args: object, **kwargs: object) -> None:
            raise ImportError(reason)

        return type(name, (), {"__init__": unavailable})
