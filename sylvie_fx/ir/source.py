"""Which line of a captured stack is the user's."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_LIBRARIES = ("torch_geometric", "dgl")


def user_line(trace: str | None) -> str:
    """The innermost ``file:line`` of a stack that is the user's; else a graph library's; else the innermost of all.

    Args:
        trace: A formatted stack.
    """
    frames = [(file, line) for file, line, _ in _FRAME.findall(trace or "") if not _generated(file)]
    ours, libraries = _folders()
    own = [f for f in frames if not f[0].startswith((*ours, *libraries))]
    library = [f for f in frames if f[0].startswith(libraries)] if libraries else []
    chosen = own or library or frames
    return f"{chosen[-1][0]}:{chosen[-1][1]}" if chosen else ""


def running_line(thread: int | None = None) -> str:
    """The user's ``file:line`` that runs now in a thread, or else in the main one, which waits for it; empty for none.

    Args:
        thread: Its identifier; None for the calling one.
    """
    frames = sys._current_frames()
    for one in (thread or threading.get_ident(), threading.main_thread().ident or 0):
        line = user_line("".join(traceback.format_stack(frames[one]))) if one in frames else ""
        if line and not is_ours(line):
            return line
    return ""


def is_ours(file: str) -> bool:
    """Whether a file is part of this package, of torch, or of Python."""
    return file.startswith(_folders()[0])


def _generated(file: str) -> bool:
    """Code without a file, and files that a graph library writes for itself."""
    return file.startswith("<") or os.path.basename(file).startswith(_LIBRARIES)


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders of this package, torch and Python; and those of graph libraries. By place, since names mean nothing."""
    here = Path(__file__).parent.parent
    beside = [(here / part).resolve() for part in ("passes", "runtime", "kernels")]
    ours = {str(p) for p in (here, here.resolve(), *beside)} | set(_package("torch"))
    libraries = {folder for name in _LIBRARIES for folder in _package(name)}
    return tuple(f"{f}{os.sep}" for f in sorted(ours)) + _standard_library(), tuple(
        f"{f}{os.sep}" for f in sorted(libraries)
    )


def _standard_library() -> tuple[str, ...]:
    """Python's own modules and packages, one by one: their folder may hold site-packages too."""
    entries = sorted(Path(sysconfig.get_paths()["stdlib"]).iterdir())
    modules = tuple(str(p) for p in entries if p.suffix == ".py")
    return modules + tuple(f"{p}{os.sep}" for p in entries if p.is_dir() and p.name != "site-packages")


def _package(name: str) -> list[str]:
    spec = importlib.util.find_spec(name)
    return list(spec.submodule_search_locations or []) if spec is not None else []
