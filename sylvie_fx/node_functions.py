"""What a NodeTensor answers by itself: its global shape, rows picked by a sharded mask, gradients, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.graphs.sharded import Space
from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.leaves import Sharding
from sylvie_fx.memory import Memory
from sylvie_fx.node_tensor import ANSWERS, NodeTensor, caller_line, node_tensor, run, sound

_plain = torch._C.DisableTorchFunctionSubclass


def _answers(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(answer: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            ANSWERS[function] = answer
        return answer

    return register


_one: Any
_functions: tuple[Any, ...]

# --- shape ---------------------------------------------------------------------------------------------------------


@_answers(torch.Tensor.shape.__get__)  # type: ignore[attr-defined]
def _shape(value: NodeTensor) -> torch.Size:
    sharding = value._sharding
    with _plain():
        sizes = list(value.shape)
    sizes[sharding.dim] = sharding.space.rows
    return torch.Size(sizes)


@_answers(torch.Tensor.size)
def _size(value: NodeTensor, dim: int | None = None) -> Any:
    shape = _shape(value)
    return shape if dim is None else shape[dim]


@_answers(torch.Tensor.numel, torch.Tensor.nelement, torch.numel)
def _numel(value: NodeTensor) -> int:
    return int(_shape(value).numel())


@_answers(torch.Tensor.__len__)
def _len(value: NodeTensor) -> int:
    return int(_shape(value)[0])


@_answers(torch.Tensor.__iter__)
def _iter(value: NodeTensor) -> Iterator[Any]:
    return iter(_unbind(value))


@_answers(torch.Tensor.unbind, torch.unbind)
def _unbind(input: NodeTensor, dim: int = 0) -> Any:
    if dim % input.dim() == input._sharding.dim:
        _refuse("an iteration")(input)
    return run(torch.unbind, (input, dim), {})


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor and sizes, where the number of rows may come first: it is taken from the tensor then."""

    def by_rows(value: Tensor, *rest: int, **kwargs: Any) -> Any:
        return function(value, (value.shape[0], *rest), **kwargs)

    def answer(value: NodeTensor, *sizes: Any, **kwargs: Any) -> Any:
        flat = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        if value._sharding.dim == 0 and flat and flat[0] == len(value) and all(isinstance(s, int) for s in flat):
            return run(by_rows, (value, *flat[1:]), kwargs)
        return run(function, (value, *sizes), kwargs)

    return answer


for _one in (
    torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.expand, torch.Tensor.new_zeros, torch.Tensor.new_ones,
    torch.Tensor.new_empty,
):  # fmt: skip
    ANSWERS[_one] = _sized(_one)


# --- rows picked by a mask or a list of ids --------------------------------------------------------------------------


@_answers(torch.Tensor.__getitem__)
def _getitem(value: Any, index: Any) -> Any:
    if isinstance(value, NodeTensor) and isinstance(index, NodeTensor) and not value._sharding.dim:
        picked = _pick(value, index)
        if picked is not None:
            return picked
    elif isinstance(value, NodeTensor) and not value._sharding.dim:
        if isinstance(index, slice) and index != slice(None):
            part = _at(value, torch.arange(len(value))[index])
            part._memory.join(value._memory, index)
            return part
        ids = torch.tensor(index) if isinstance(index, list) and index else index
        if isinstance(ids, Tensor) and ids.dim() == 1 and not ids.dtype.is_floating_point and ids.dtype != torch.bool:
            raise SylvieError(
                "rows of the graph are picked by ids that are not sharded",
                where=caller_line(),
                why="each rank holds the rows of its own nodes only",
                remedy="shard the ids first: ids = model.shard(torch.as_tensor(ids))",
            )
    return run(torch.Tensor.__getitem__, (value, index), {})


@_answers(torch.masked_select, torch.Tensor.masked_select)
def _masked_select(input: Any, mask: Any) -> Any:
    with _plain():
        alike = input.dim() == mask.dim() == 1
    return _getitem(input, mask) if alike else run(torch.masked_select, (input, mask), {})


@_answers(torch.index_select, torch.Tensor.index_select)
def _index_select(input: Any, dim: int, index: Any) -> Any:
    return _getitem(input, index) if dim == 0 else run(torch.index_select, (input, dim, index), {})


def _pick(value: NodeTensor, index: NodeTensor) -> NodeTensor | None:
    """Rows picked by a sharded mask or a sharded list of node ids: row-local. None where it is neither."""
    theirs, mine = sound(index)._sharding, sound(value)._sharding
    with _plain():
        one_dimensional, is_mask = index.dim() == 1, index.dtype == torch.bool
    if not one_dimensional:
        return None
    if is_mask and theirs.space is mine.space:
        if theirs.whole is None:
            local = index.local()
            return _rows(value, local.nonzero().flatten(), _picked_by(index, local))
        if theirs.picked is None:
            owner = mine.space.layout.owner[theirs.whole.to(mine.space.layout.owner.device)]
            space = mine.graph.subset(RowLayout(owner, mine.space.layout.parts))
            theirs.picked = (index.local().nonzero().flatten(), space)
        return _rows(value, *theirs.picked)
    if theirs.index and theirs.whole is not None and mine.space is mine.graph.spaces["N"]:
        if theirs.picked is None:
            layout = mine.space.layout
            if not torch.equal(layout.owner[theirs.whole.cpu()], theirs.space.layout.owner):
                return None
            theirs.picked = (layout.position[index.local().cpu()].to(value.device), theirs.space)
        return _rows(value, *theirs.picked)
    return None


def _at(value: NodeTensor, ids: Tensor) -> NodeTensor:
    """The rows with these global numbers, which are the same on every rank."""
    sound(value)
    layout, rank = value._sharding.space.layout, value._engine.transport.rank
    owner = layout.owner[ids]
    positions = layout.position[ids[owner == rank]].to(value.device)
    return _rows(value, positions, value._sharding.graph.subset(RowLayout(owner, layout.parts)))


def _picked_by(index: NodeTensor, local: Tensor) -> Space:
    """The space of the rows that a mask picks which is known by its owners alone: every rank tells what it picks."""
    layout, transport = index._sharding.space.layout, index._engine.transport
    chosen = transport.all_gather_object(layout.rows(transport.rank)[local.cpu()], "mask")
    ids = torch.cat(chosen)
    owner = torch.cat([torch.full((len(c),), r) for r, c in enumerate(chosen)])[torch.argsort(ids)]
    return index._sharding.graph.subset(RowLayout(owner, layout.parts))


def _rows(value: NodeTensor, positions: Tensor, space: Space) -> NodeTensor:
    sharding = value._sharding
    return node_tensor(value.local().index_select(0, positions), Sharding(sharding.graph, space), value._engine)


# --- gradients and copies --------------------------------------------------------------------------------------------


@_answers(torch.Tensor.grad.__get__)  # type: ignore[union-attr]
def _grad(value: NodeTensor) -> NodeTensor | None:
    with _plain():
        found = value.grad
    return None if found is None else _like(value, found)


@_answers(torch.Tensor.requires_grad_)
def _requires_grad(value: NodeTensor, flag: bool = True) -> NodeTensor:
    with _plain():
        value.requires_grad = flag
    return value


@_answers(torch.Tensor.backward)
def _backward(value: NodeTensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    gradient = gradient.local() if isinstance(gradient, NodeTensor) else gradient
    torch.autograd.backward(value.local(), gradient, *args, **kwargs)


@_answers(torch.autograd.grad)
def _autograd_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    with _plain():
        found = torch.autograd.grad(outputs, inputs, *args, **kwargs)
    return tuple(
        _like(t, g) if isinstance(t, NodeTensor) and g is not None else g for t, g in zip(wanted, found, strict=True)
    )


@_answers(torch.Tensor.register_hook)
def _register_hook(value: NodeTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The hook is given the global gradient, and gives one: its norm is the same on every rank."""
    sharding, engine = value._sharding, value._engine  # not the tensor, which would then hold itself
    where = caller_line()

    def on_rows(gradient: Tensor) -> Tensor | None:
        rows = Sharding(sharding.graph, sharding.space, sharding.dim)
        given = hook(node_tensor(gradient.as_subclass(torch.Tensor), rows, engine))
        if given is None:
            return None
        local = given.local() if isinstance(given, NodeTensor) else given
        same = not isinstance(given, NodeTensor) or given._sharding.space is sharding.space
        if not same or local.shape != gradient.shape:
            raise SylvieError(
                f"a hook of a tensor returns a tensor of shape {tuple(given.shape)}, which has other rows than the gradient",
                where=where,
                remedy="return what is computed from the gradient row by row, or .local() rows of this rank",
            )
        return local

    with _plain():
        return value.register_hook(on_rows)  # type: ignore[no-untyped-call]


@_answers(torch.Tensor.__deepcopy__)
def _deepcopy(value: NodeTensor, memo: Any) -> NodeTensor:
    copied = _like(value, value.local().detach().clone())
    return _requires_grad(copied, value.requires_grad)  # type: ignore[no-any-return]


def _like(value: NodeTensor, local: Tensor) -> NodeTensor:
    """Rows of the same space, without the whole: the values are others."""
    sharding = value._sharding
    return node_tensor(
        local.as_subclass(torch.Tensor), Sharding(sharding.graph, sharding.space, sharding.dim), value._engine
    )


def _same(function: Any) -> Callable[..., Any]:
    """Run on the local rows and keep what they are rows of, the whole included."""

    def answer(value: NodeTensor, *args: Any, **kwargs: Any) -> NodeTensor:
        with _plain():
            result = function(value, *args, **kwargs).as_subclass(torch.Tensor)
            copied = result.data_ptr() != value.data_ptr()
        return node_tensor(result, value._sharding, value._engine, None if copied else value._memory)

    return answer


for _one in (torch.Tensor.detach, torch.detach, torch.Tensor.cpu, torch.Tensor.cuda):
    ANSWERS[_one] = _same(_one)
# Not as of a plain tensor: torch would count writes into .data for themselves, and what is kept of x would stay as it was.
ANSWERS[torch.Tensor.data.__get__] = _same(torch.Tensor.detach)  # type: ignore[attr-defined]


@_answers(torch.Tensor.contiguous)
def _contiguous(value: NodeTensor, memory_format: torch.memory_format = torch.contiguous_format) -> NodeTensor:
    """The same memory or a copy, as the tensor of all rows would be; this rank's rows may lie otherwise."""
    sharding, local = value._sharding, value.local()
    layout = local if sharding.whole is None else sharding.whole
    if not layout.is_contiguous(memory_format=memory_format):
        return node_tensor(local.clone(memory_format=memory_format), sharding, value._engine)
    result: NodeTensor = _same(torch.Tensor.contiguous)(value, memory_format=memory_format)
    if result._memory is not value._memory:
        result._memory.join(value._memory)
    return result


@_answers(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(value: Any, new: Tensor) -> None:
    """``x.data = rows of the same nodes or edges``; plain rows of this rank too, where no whole would miss them."""
    mine = value._sharding if isinstance(value, NodeTensor) else None
    theirs = sound(new)._sharding if isinstance(new, NodeTensor) else mine
    fits = mine is not None and theirs is not None and (mine.space, mine.dim) == (theirs.space, theirs.dim)
    if mine is None or theirs is None or not fits or mine.given or (theirs is mine and mine.whole is not None):
        raise SylvieError(
            ".data = ... would not give this tensor rows of the same nodes or edges",
            where=caller_line(),
            remedy="give it a result of sharded tensors with the same rows, or use the new tensor in its place",
        )
    with _plain():
        value.data = new.as_subclass(torch.Tensor)
    value._memory = Memory(value.local(), theirs)
    if isinstance(new, NodeTensor) and theirs.whole is not None:
        value._memory.join(new._memory)


@_answers(torch.Tensor.type_as)
def _type_as(value: Any, other: Tensor) -> Any:
    return value.to(other.dtype)


# --- each rank's own business, and refusals --------------------------------------------------------------------------


def _own(function: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        with _plain():
            return function(*args, **kwargs)

    return answer


for _one in (
    torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.is_floating_point, torch.is_floating_point,
    torch.Tensor.is_complex, torch.is_complex, torch.Tensor.get_device, torch.Tensor.is_contiguous, torch.Tensor.stride,
    torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.__hash__, torch.Tensor.element_size,
    torch.is_tensor, torch.Tensor.storage_offset, torch.Tensor.as_subclass, torch.Tensor.detach_,
):  # fmt: skip
    ANSWERS[_one] = _own(_one)


def _refuse(what: str) -> Callable[..., Any]:
    def answer(value: Any, *args: Any, **kwargs: Any) -> Any:
        raise SylvieError(
            f"{what} of a tensor whose rows are spread over the ranks would show this rank's rows only",
            where=caller_line(),
            remedy="use .local() for this rank's rows, or .full() for the whole tensor on every rank",
        )

    return answer


for _functions, _what in (
    ((torch.Tensor.numpy, torch.Tensor.__array__), "the numpy array"),
    ((torch.Tensor.tolist,), "the list"),
    (
        (
            torch.Tensor.item,
            torch.Tensor.__float__,
            torch.Tensor.__int__,
            torch.Tensor.__bool__,
            torch.Tensor.__index__,
        ),
        "the number",
    ),
    ((torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage), "the memory"),
):
    for _one in _functions:
        ANSWERS[_one] = _refuse(_what)
