"""Digests of graphs, models and options, so that ranks which do not hold the same find out before anything trains."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sylvie_fx.ir.errors import CommError, OptionError
from sylvie_fx.runtime.transport import Transport

#: Longest value that is quoted beside its digest.
_QUOTED = 120


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...


def digest(value: Any) -> str:
    """A hexadecimal digest that is equal exactly where values are, bit for bit, in every process.

    Args:
        value: Tensors (dense, COO, CSR; any dtype and device), arrays, numbers, strings, bytes, None, enums,
            dataclasses, and mappings, sequences and sets of these. The order of a mapping counts.

    Raises:
        OptionError: A value of another type, which has no bytes that mean the same everywhere.
    """
    state = hashlib.blake2b(digest_size=16)
    _feed(state, value)
    return state.hexdigest()


def check_equal_across_ranks(transport: Transport, name: str, value: Any, label: str) -> None:
    """Raise on every rank where the ranks do not hold the same value.

    Args:
        transport: The wire; all ranks must call this.
        name: What the value is, for the message: "graph", "options", …
        value: As ``digest`` takes it.
        label: The label of the exchange.

    Raises:
        CommError: Names the ranks that differ.
    """
    held = transport.all_gather_object((digest(value), _quote(value)), label)
    digests = [one for one, _ in held]
    if len(set(digests)) == 1:
        return
    common, count = Counter(digests).most_common(1)[0]
    if count * 2 > transport.size:
        odd = [rank for rank, one in enumerate(digests) if one != common]
        what = f"{_ranks(odd)} of {transport.size} {'holds' if len(odd) == 1 else 'hold'} another {name} than the rest"
    else:
        what = f"the {transport.size} ranks hold {len(set(digests))} different values of {name}"
    quoted = [f"rank {rank} has {text}" for rank, (_, text) in enumerate(held) if text]
    raise CommError(
        what,
        why=", ".join(quoted) or ", ".join(f"rank {rank} has digest {one[:8]}" for rank, one in enumerate(digests)),
        remedy=f"give every rank the same {name} (same file, same arguments, same seeds of torch, numpy and random)",
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _quote(value: Any) -> str:
    """A short plain value as text, or nothing."""
    if isinstance(value, str | int | float | bool | tuple) or dataclasses.is_dataclass(value):
        text = repr(value)
        if len(text) <= _QUOTED and "tensor(" not in text:
            return text
    return ""


def _feed(state: _Hash, value: Any) -> None:
    """Add one value, tagged with its type and length so that no two structures give the same bytes."""
    if isinstance(value, Tensor):
        _feed_tensor(state, value)
    elif isinstance(value, np.ndarray):
        state.update(f"array {value.dtype.str} {value.shape};".encode())
        state.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, enum.Enum):
        state.update(f"enum {type(value).__qualname__}.{value.name};".encode())
    elif value is None or isinstance(value, bool | int | float | complex | np.generic):
        state.update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        state.update(f"{type(value).__name__} {len(raw)};".encode())
        state.update(raw)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        state.update(f"dataclass {type(value).__qualname__};".encode())
        _feed(state, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif isinstance(value, Mapping):
        state.update(f"mapping {len(value)};".encode())
        for key, entry in value.items():
            _feed(state, key)
            _feed(state, entry)
    elif isinstance(value, list | tuple):
        state.update(f"sequence {len(value)};".encode())
        for entry in value:
            _feed(state, entry)
    elif isinstance(value, set | frozenset):
        state.update(f"set {len(value)};".encode())
        for text in sorted(digest(entry) for entry in value):
            state.update(text.encode())
    else:
        raise OptionError(
            f"a {type(value).__name__} can not be compared across ranks", remedy="pass its tensors, numbers and strings"
        )


def _feed_tensor(state: _Hash, tensor: Tensor) -> None:
    state.update(f"tensor {tensor.dtype} {tuple(tensor.shape)} {tensor.layout};".encode())
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        whole = tensor.coalesce()
        parts = [whole.indices(), whole.values()]
    elif tensor.layout == torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = [tensor]
    for part in parts:
        state.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
