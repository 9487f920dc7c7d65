"""``len`` that keeps a size symbolic: Python's own turns a symbol into the number of the sample."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from sylvie_fx.capture.dgl_mailbox import Mailbox
from sylvie_fx.dgl import dgl

_SIZED = (dgl.udf.EdgeBatch, dgl.udf.NodeBatch, dgl.frame.Column, dgl.frame._LazyIndex, Mailbox)


@contextmanager
def symbolic_len() -> Iterator[None]:
    """While active, ``len`` of a tensor (or of a batch of nodes or edges) is its symbolic number of rows."""
    with mock.patch.object(builtins, "len", _keeping_symbols(builtins.len)):
        yield


def _keeping_symbols(original: Callable[[Any], int]) -> Callable[[Any], Any]:
    def length(value: Any, /) -> Any:
        if isinstance(value, Tensor):
            return value.shape[0] if value.dim() else original(value)
        if isinstance(value, _SIZED):
            return type(value).__len__(value)
        return original(value)

    return length
