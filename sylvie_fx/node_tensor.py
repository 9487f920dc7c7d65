"""NodeTensor: this rank's rows of a global tensor, on which a user's loss and metric lines stay global and exact.

Every function on a NodeTensor is captured as a program of one operator and rewritten by the passes that rewrite
models, so that one table of rules says what is row-local, what needs an all_reduce, and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sylvie_fx.capture.inputs import Frontend, flatten_call
from sylvie_fx.engine import Engine, Leaf, Sharding
from sylvie_fx.graphs.layout import RowLayout
from sylvie_fx.graphs.sharded import ShardedGraph, Space
from sylvie_fx.ir.errors import CaptureError, SylvieError


class NodeTensor(torch.Tensor):
    """This rank's rows of a tensor with one row per node, edge, or picked node.

    ``shape``, ``size()`` and ``len()`` are those of the global tensor; reductions over its rows give the global value on
    every rank, with the right gradient. :meth:`local` is the plain tensor of this rank's rows, :meth:`full` the whole.
    """

    _sharding: Sharding
    _engine: Engine

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the global tensors that the arguments are rows of."""
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in _PLAIN or getattr(func, "__name__", "") in _PLAIN_NAMES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _run(func, args, kwargs)

    def local(self) -> Tensor:
        """The plain tensor of this rank's rows; gradients flow through."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def full(self) -> Tensor:
        """The global tensor on every rank, detached. Every rank must call it.

        Returns:
            A plain tensor of the global shape.
        """
        sharding, local = self._sharding, self.local().detach()
        layout, dim = sharding.space.layout, sharding.dim
        parts = self._engine.transport.all_gather_object(local.movedim(dim, 0).cpu(), "full")
        out = local.new_empty((len(layout.owner), *local.movedim(dim, 0).shape[1:]))
        for rank, part in enumerate(parts):
            out[layout.rows(rank)] = part.to(local.device)
        return out.movedim(0, dim)

    @property
    def rows(self) -> Tensor:
        """int64 ``[local rows]``: the global indices of this rank's rows."""
        return self._sharding.space.layout.rows(self._engine.transport.rank)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The local rows and what they are rows of."""
        sharding = self._sharding
        return f"NodeTensor({self.local()!r}, rows of {sharding.space.name}, {tuple(self.shape)} in all)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickling keeps the local rows only, as a plain tensor."""
        return self.local().__reduce_ex__(protocol)


def node_tensor(local: Tensor, sharding: Sharding, engine: Engine) -> NodeTensor:
    """Wrap this rank's rows.

    Args:
        local: ``[..., local rows, ...]``.
        sharding: What they are rows of.
        engine: Who runs functions on it.
    """
    wrapped = local.as_subclass(NodeTensor)
    wrapped._sharding, wrapped._engine = sharding, engine
    return wrapped


def leaf_of(path: str, value: Tensor) -> Leaf:
    """A tensor of a call as the engine sees it."""
    if isinstance(value, NodeTensor):
        return Leaf(path, value.local(), value._sharding)
    return Leaf(path, value, None)


class _Function(nn.Module):
    """A function as a module, for the capture."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.function(*args, **kwargs)


_NO_FRONTENDS: Sequence[Frontend] = ()


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = flatten_call(args, kwargs, _NO_FRONTENDS)
    first = next(t for _, t in call.leaves if isinstance(t, NodeTensor))
    engine = first._engine
    name = getattr(func, "__name__", str(func))
    in_place = _in_place(name)
    if in_place is not None:
        result = getattr(torch.Tensor, in_place)(*args, **kwargs)
        target = args[0]
        if not isinstance(target, NodeTensor) or not isinstance(result, NodeTensor) or result._sharding.space is not target._sharding.space:
            raise SylvieError(f"{name} would write rows of the graph into a tensor that is the same on every rank",
                              remedy="use the function that returns a new tensor")  # fmt: skip
        local = result.local()
        target.local().copy_(local) if not local.requires_grad else target.local().set_(local)  # type: ignore[call-overload]
        return target
    leaves = [leaf_of(path, t) for path, t in call.leaves]
    module = _FUNCTIONS.setdefault(func, _Function(func)) if _hashable(func) else _Function(func)

    def wrap(value: Tensor, graph: ShardedGraph, space: Space, dim: int) -> Tensor:
        return node_tensor(value, Sharding(graph, space, dim), engine)

    try:
        return engine.run(module, leaves, call, ("function", func), 0, wrap)
    except CaptureError as error:
        raise CaptureError(
            f"{name} on rows of the graph: {error.what}", why=error.why,
            remedy=error.remedy or "use .local() for this rank's rows alone, or .full() for the whole tensor on every rank",
        ) from error  # fmt: skip


_FUNCTIONS: dict[Any, _Function] = {}  # one module for each function, so that its programs are found again


def _hashable(func: Any) -> bool:
    try:
        hash(func)
    except TypeError:
        return False
    return True


def _in_place(name: str) -> str | None:
    """The out-of-place method that an in-place one stands for."""
    if name.startswith("__i") and name.endswith("__") and name not in ("__int__", "__invert__", "__index__", "__iter__"):
        return "__" + name[3:]
    if name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name[:-1]):
        return name[:-1]
    return None


# --- what a global tensor answers by itself ------------------------------------------------------------------------


def _shape(value: NodeTensor) -> torch.Size:
    sharding = value._sharding
    with torch._C.DisableTorchFunctionSubclass():
        sizes = list(value.shape)
    sizes[sharding.dim] = sharding.space.rows
    return torch.Size(sizes)


def _size(value: NodeTensor, dim: int | None = None) -> Any:
    shape = _shape(value)
    return shape if dim is None else shape[dim]


def _numel(value: NodeTensor) -> int:
    return _shape(value).numel()


def _len(value: NodeTensor) -> int:
    return _shape(value)[0]


def _getitem(value: Any, index: Any) -> Any:
    if isinstance(value, NodeTensor) and isinstance(index, NodeTensor) and not value._sharding.dim:
        picked = _pick(value, index)
        if picked is not None:
            return picked
    return _run(torch.Tensor.__getitem__, (value, index), {})


def _pick(value: NodeTensor, index: NodeTensor) -> NodeTensor | None:
    """Rows picked by a sharded mask or a sharded list of node ids: row-local."""
    theirs, mine = index._sharding, value._sharding
    engine = value._engine
    layout, rank = mine.space.layout, engine.transport.rank
    with torch._C.DisableTorchFunctionSubclass():
        one_dimensional = index.dim() == 1
        is_mask = index.dtype == torch.bool
    if not one_dimensional:
        return None
    if is_mask and theirs.space is mine.space:
        local = index.local()
        if theirs.whole is not None:
            owner = layout.owner[theirs.whole.to(layout.owner.device)]
        else:
            chosen = engine.transport.all_gather_object(layout.rows(rank)[local.cpu()], "mask")
            ids = torch.cat(chosen)
            owner = torch.cat([torch.full((len(c),), r) for r, c in enumerate(chosen)])[torch.argsort(ids)]
        space = mine.graph.subset(RowLayout(owner, layout.parts))
        return node_tensor(value.local()[local], Sharding(mine.graph, space, 0), engine)
    if theirs.index and theirs.whole is not None and theirs.whole.dim() == 1 and mine.space is mine.graph.spaces["N"]:
        positions = layout.position[index.local().cpu()].to(value.device)
        owner = layout.owner[theirs.whole.cpu()]
        if not torch.equal(owner, theirs.space.layout.owner):
            return None
        return node_tensor(value.local()[positions], Sharding(mine.graph, theirs.space, 0), engine)
    return None


def _refuse(what: str) -> Callable[..., Any]:
    def raise_error(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, NodeTensor):
            raise SylvieError(f"{what} of a tensor whose rows are spread over the ranks would show this rank's rows only",
                              remedy="use .local() for this rank's rows, or .full() for the whole tensor on every rank")  # fmt: skip
        return None

    return raise_error


def _deepcopy(value: NodeTensor, memo: Any) -> NodeTensor:
    return node_tensor(value.local().detach().clone(), value._sharding, value._engine)


def _keep(function: Any) -> Callable[..., Any]:
    """Run on the local rows and keep what they are rows of, the whole included."""

    def run(value: NodeTensor, *args: Any, **kwargs: Any) -> NodeTensor:
        sharding = value._sharding
        with torch._C.DisableTorchFunctionSubclass():
            result = function(value, *args, **kwargs)
        return node_tensor(result.as_subclass(torch.Tensor), sharding, value._engine)

    return run


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    torch.Tensor.size: _size,
    torch.Tensor.numel: _numel,
    torch.Tensor.nelement: _numel,
    torch.numel: _numel,
    torch.Tensor.__len__: _len,
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.detach: _keep(torch.Tensor.detach),
    torch.Tensor.cpu: _keep(torch.Tensor.cpu),
    torch.Tensor.cuda: _keep(torch.Tensor.cuda),
    torch.Tensor.requires_grad_: lambda value, flag=True: _requires_grad(value, flag),
    torch.Tensor.numpy: _refuse("the numpy array"),
    torch.Tensor.tolist: _refuse("the list"),
    torch.Tensor.item: _refuse("the number"),
    torch.Tensor.__array__: _refuse("the numpy array"),
    torch.Tensor.__iter__: _refuse("an iteration"),
    torch.Tensor.data_ptr: _refuse("the address"),
    torch.Tensor.backward: lambda value, *a, **k: value.local().backward(*a, **k),
}


def _requires_grad(value: NodeTensor, flag: bool) -> NodeTensor:
    value.local().requires_grad_(flag)
    with torch._C.DisableTorchFunctionSubclass():
        value.requires_grad = flag
    return value


_PLAIN = frozenset({
    torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.is_complex,
    torch.Tensor.get_device, torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.retain_grad, torch.Tensor.register_hook,
    torch.Tensor.__hash__, torch.Tensor.element_size, torch.is_tensor, torch.Tensor.storage_offset, torch.Tensor.as_subclass,
})  # fmt: skip
_PLAIN_NAMES = frozenset({"__get__", "__set__", "__delete__", "__dir__", "__format__"})
