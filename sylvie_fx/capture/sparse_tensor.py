"""A tensor that answers like a sparse matrix and is made of plain index and value tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from sylvie_fx.capture.sparse_layout import Entries, Order, final_order
from sylvie_fx.ir.errors import CaptureError
from sylvie_fx.ir.source import user_line

Handler = Callable[..., Any]
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class StandInAdjacency(Tensor):
    """Stands in for a torch sparse matrix while a model is captured.

    It is an instance of ``torch.Tensor`` and answers ``layout``, ``shape``, ``is_sparse``, … as the matrix does, but
    holds plain tensors only: a product becomes a gather, a multiplication and a scatter. What it does not know is
    refused with :class:`~sylvie_fx.ir.errors.CaptureError`, never done densely.

    Args:
        entries: The stored entries. Values of shape ``[E, ...]`` make a hybrid matrix, which can be taken apart but
            not multiplied.
        layout: ``torch.sparse_coo``, ``torch.sparse_csr`` or ``torch.sparse_csc``.
        coalesced: What ``is_coalesced()`` answers; of meaning for COO only.
    """

    handlers: ClassVar[dict[str, Handler]] = {}

    entries: Entries
    kind: torch.layout
    coalesced: bool

    @staticmethod
    def __new__(cls, entries: Entries, layout: torch.layout, coalesced: bool = True) -> StandInAdjacency:
        """Make the tensor object that the entries hang on; it owns no memory."""
        if layout not in LAYOUTS:
            refuse(f"a sparse matrix of layout {layout}", "only COO, CSR and CSC are known")
        value = entries.value
        made: StandInAdjacency = torch.Tensor._make_wrapper_subclass(
            cls,
            (entries.n_rows, entries.n_cols, *(() if value is None else value.shape[1:])),
            dtype=torch.get_default_dtype() if value is None else value.dtype,
            device=entries.row.device,
            requires_grad=value is not None and value.requires_grad,
        )
        return made

    def __init__(self, entries: Entries, layout: torch.layout, coalesced: bool = True) -> None:
        """Keep the entries; see the class."""
        self.entries = entries
        self.kind = layout
        self.coalesced = coalesced

    def stored(self) -> Entries:
        """The entries as the matrix would store them: merged and sorted where its layout or flag says so."""
        if self.kind is not torch.sparse_coo or self.coalesced:
            self.entries = self.entries.ordered(final_order(self.kind))
        return self.entries

    def merged(self) -> Entries:
        """The entries with each place once, in the layout's order."""
        self.entries = self.entries.ordered(final_order(self.kind))
        return self.entries

    def remade(self, entries: Entries, layout: torch.layout | None = None, coalesced: bool | None = None) -> Tensor:
        """A matrix of the same layout and flag (where not given) over other entries."""
        return StandInAdjacency(
            entries,
            self.kind if layout is None else layout,
            self.coalesced if coalesced is None else coalesced,
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer one torch call from its handler, or refuse it by name."""
        name = call_name(func)
        handler = cls.handlers.get(name)
        if handler is None:
            refuse(f"'{name}' on a sparse adjacency", "it has no form as gathers and scatters over the edges")
        return handler(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse what reached the dispatcher without being asked for: the matrix has no memory to work on."""
        refuse(f"'{func}' on a sparse adjacency", "it reads the matrix below the level where its entries are known")

    def __repr__(self) -> str:  # type: ignore[override]
        """Layout and shape; reads nothing."""
        return f"StandInAdjacency({self.kind}, {self.entries.n_rows} x {self.entries.n_cols})"

    def __format__(self, spec: str) -> str:
        """As ``repr``."""
        return format(repr(self), spec)


def stand_in_adjacency(
    row: Tensor,
    col: Tensor,
    value: Tensor | None,
    num_nodes: int,
    layout: torch.layout,
    coalesced: bool = True,
) -> StandInAdjacency:
    """A stand-in for a square adjacency.

    Args:
        row: int64 ``[E]``, sorted where the layout is CSR.
        col: int64 ``[E]``, sorted where the layout is CSC.
        value: ``[E]`` of any dtype, or ``None`` where every entry is 1.
        num_nodes: ``N``; a symbol while capturing (the size of any tensor with a row per node).
        layout: ``torch.sparse_coo``, ``torch.sparse_csr`` or ``torch.sparse_csc``.
        coalesced: For COO, whether the entries are sorted and each place occurs once.

    Raises:
        CaptureError: The layout is another one.
    """
    final = coalesced or layout is not torch.sparse_coo
    order = final_order(layout) if final else Order.ANY
    return StandInAdjacency(Entries(row, col, value, num_nodes, num_nodes, order), layout, final)


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for calls of these names (see :func:`call_name`) that get a stand-in."""

    def register(handler: Handler) -> Handler:
        StandInAdjacency.handlers.update(dict.fromkeys(names, handler))
        return handler

    return register


def call_name(func: Callable[..., Any]) -> str:
    """The name of a torch function or method; ``get:shape`` for an attribute read, ``set:data`` for a write.

    One name is one operation in torch, whether called as a function or as a method.
    """
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{name.strip('_')}:{getattr(getattr(func, '__self__', None), '__name__', '?')}"
    return name


def refuse(what: str, why: str, remedy: str | None = None) -> NoReturn:
    """Raise the one error of this stand-in, at the user's line.

    Raises:
        CaptureError: Always.
    """
    advice = remedy or "Multiply with the adjacency as adj @ x, or take it apart with indices() and values()"
    raise CaptureError(
        f"The model uses {what}",
        where=user_line("".join(traceback.format_stack())),
        why=why[:1].upper() + why[1:],
        remedy=advice,
    )
