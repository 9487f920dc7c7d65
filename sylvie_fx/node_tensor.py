"""NodeTensor: this rank's rows of a global tensor, on which a user's loss and metric lines stay global and exact.

Every function on a NodeTensor is captured as a program of one operator and rewritten by the passes that rewrite
models, so that one table of rules says what is row-local, what needs an all_reduce, and what is refused. The few that a
global tensor answers by itself (its shape, picking rows by a mask, its gradient) are in sylvie_fx/node_functions.py.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from sylvie_fx.capture.inputs import Frontend, flatten_call
from sylvie_fx.clock import Moment
from sylvie_fx.engine import Engine, Function
from sylvie_fx.ir.errors import CaptureError, PassError, SylvieError
from sylvie_fx.ir.source import user_line
from sylvie_fx.leaves import Leaf, Sharding
from sylvie_fx.memory import Memory, is_copy, place_of

ANSWERS: dict[Any, Callable[..., Any]] = {}  # function of torch to who answers it, filled by node_functions at import

_NO_FRONTENDS: Sequence[Frontend] = ()
_T = TypeVar("_T")
_DRAWS = 1 << 32  # draws of dropouts outside a model, so that none has the masks of a model's


class NodeTensor(torch.Tensor):
    """This rank's rows of a tensor with one row per node, edge, or picked node.

    ``shape``, ``size()`` and ``len()`` are those of the global tensor; reductions over its rows give the global value
    on every rank, with the right gradient. :meth:`local` is the plain tensor of this rank's rows, :meth:`full` the
    whole.

    Write into the tensor itself (``y[mask] = 0``, ``w.mul_(2)``), into ``detach()`` or ``.data`` of it. Integers, masks
    and edge data are also kept as a whole, which a write through :meth:`local` or a view does not reach: the next use
    of the tensor raises. A write into ``x.local().data`` is not seen by torch, and so by nobody.
    """

    _memory: Memory
    _engine: Engine

    @property
    def _sharding(self) -> Sharding:
        return self._memory.sharding

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function on the global tensors that the arguments are rows of."""
        kwargs = kwargs or {}
        answer = ANSWERS.get(func)
        if answer is not None:
            return answer(*args, **kwargs)
        if getattr(func, "__name__", "") in _ACCESSORS:
            return _access(func, args, kwargs)
        return run(func, args, kwargs)

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
        label = f"full() of {local.dtype} {list(self.shape)}"
        parts = self._engine.transport.all_gather_object(local.movedim(dim, 0).cpu(), label)
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
        """Refused: a file of one rank's rows looks like one of the whole tensor.

        Raises:
            SylvieError: Always.
        """
        raise SylvieError(
            "a tensor whose rows are spread over the ranks is pickled or saved",
            where=caller_line(),
            why="this rank has its own rows only",
            remedy="save .full(), which every rank must call, or .local() for this rank's rows",
        )

    def __copy__(self) -> NodeTensor:
        """The same rows in the same memory, as of any tensor."""
        alias = node_tensor(self.local().detach(), self._sharding, self._engine, self._memory)
        alias.requires_grad_(self.requires_grad)
        return alias


def node_tensor(local: Tensor, sharding: Sharding, engine: Engine, memory: Memory | None = None) -> NodeTensor:
    """Wrap this rank's rows.

    Args:
        local: ``[..., local rows, ...]``.
        sharding: What they are rows of.
        engine: Who runs functions on it.
        memory: The memory of another tensor, where the rows lie in it.
    """
    wrapped = local.as_subclass(NodeTensor)
    wrapped._memory, wrapped._engine = memory or Memory(local, sharding), engine
    return wrapped


def sound(value: NodeTensor) -> NodeTensor:
    """The tensor itself.

    Raises:
        SylvieError: It was written into by a way that does not reach all that is known of it.
    """
    missed = value._memory.missed(value.local())
    if missed:
        raise SylvieError(
            f"a tensor of shape {tuple(value.shape)} is used after a write that did not reach it, {missed}",
            where=caller_line(),
            why="its rows are kept in several places, and only a write through the tensor itself changes all of them",
            remedy="write into the tensor itself (y[mask] = 0, w.mul_(2)), or into a copy: y = y.clone()",
        )
    return value


def leaf_of(path: str, value: Tensor) -> Leaf:
    """A tensor of a call as the engine sees it."""
    if isinstance(value, NodeTensor):
        return Leaf(path, sound(value).local(), value._sharding)
    return Leaf(path, value, None)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch on global tensors as a program of its own.

    Raises:
        SylvieError: It can not be proven right on rows that are spread over ranks; names the caller's line.
    """
    name = getattr(func, "__name__", str(func))
    if _writes(name) and args and isinstance(args[0], Tensor):
        return _write(func, name, args, kwargs)
    return _run(func, name, args, kwargs)


def _run(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = flatten_call(args, kwargs, _NO_FRONTENDS)
    engine = next(t._engine for _, t in call.leaves if isinstance(t, NodeTensor))
    leaves = [leaf_of(path, t) for path, t in call.leaves]

    def wrap(value: Tensor, sharding: Sharding, base: int | None) -> Tensor:
        result = node_tensor(value, sharding, engine)
        viewed = None if base is None else call.leaves[base][1]
        if isinstance(viewed, NodeTensor) and place_of(value) != place_of(viewed.local()):
            whole = viewed._sharding.whole
            if viewed is args[0] and is_copy(func, args, kwargs, viewed.local() if whole is None else whole):
                return result
            key = args[1] if func is torch.Tensor.__getitem__ else None
            result._memory.join(viewed._memory, key if _is_constant(key) else None)
        return result

    draw = _DRAWS + next(engine.draws) if "dropout" in name else 0
    learning = torch.is_grad_enabled()
    try:
        module = _modules(func)[learning]
        found = engine.compile(module, leaves, call, ("function", func, learning))
        return engine.run(module, found, leaves, call, Moment(draw=draw), wrap)
    except (CaptureError, PassError) as error:
        raise _explained(error, name, leaves) from error


def _is_constant(key: Any) -> bool:
    return all(k is ... or isinstance(k, (int, slice)) for k in (key if isinstance(key, tuple) else (key,)))


def _explained(error: CaptureError | PassError, name: str, leaves: Sequence[Leaf]) -> SylvieError:
    """The refusal at the caller's line, with the remedy that fits a line outside the model."""
    remedy = error.remedy
    rows = {leaf.sharding.space.rows for leaf in leaves if leaf.sharding is not None}
    plain = next((x.local for x in leaves if x.sharding is None and x.local.dim() and x.local.shape[0] in rows), None)
    if plain is not None:
        remedy = (
            f"shard the plain tensor of shape {tuple(plain.shape)} together with the graph, or make it from a sharded "
            "one (torch.ones_like(x), x.new_zeros(...))"
        )
    remedy = remedy or "use .local() for this rank's rows alone, or .full() for the whole tensor on every rank"
    return type(error)(f"{name} on rows of the graph: {error.what}", where=caller_line(), why=error.why, remedy=remedy)


def caller_line() -> str | None:
    """``file:line`` of the user's code that is running."""
    return user_line("".join(traceback.format_stack())) or None


def _one_for_each(make: Callable[[Callable[..., Any]], _T]) -> Callable[[Callable[..., Any]], _T]:
    """Keep what is made of a function, for all threads the same.

    functools.cache hands two threads that miss at once an object each. Ranks that are threads would then disagree on
    whether the next call is of a new program, and wait for each other under different names.
    """
    made: dict[Callable[..., Any], _T] = {}
    lock = threading.Lock()

    @wraps(make)
    def found(function: Callable[..., Any]) -> _T:
        with lock:
            if function not in made:
                made[function] = make(function)
            return made[function]

    return found


@_one_for_each
def _modules(function: Callable[..., Any]) -> tuple[Function, Function]:
    """A function as a module, so that its programs are found again: in eval mode, and in training mode."""
    return Function(function).eval(), Function(function)


# --- functions that write into their first argument ---------------------------------------------------------------


def _writes(name: str) -> bool:
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__int__", "__invert__", "__index__", "__iter__")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@_one_for_each
def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """What an in-place function makes of a copy of its first argument."""

    def copied(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = target.clone()
        function(target, *args, **kwargs)
        return target

    return copied


def _write(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if not isinstance(target, NodeTensor):
        raise SylvieError(
            f"{name} would write rows of the graph into a tensor that is the same on every rank",
            where=caller_line(),
            remedy="use the function that returns a new tensor",
        )
    if target._sharding.given:
        raise SylvieError(
            f"{name} would change the graph", where=caller_line(), remedy="change it before model.shard()"
        )
    if name == "__setitem__" and isinstance(args[2], NodeTensor):
        target._memory.write_back(args[2]._memory, args[1])
    result = _run(_on_a_copy(func), name, args, kwargs)
    mine, theirs = target._sharding, result._sharding
    if (mine.space, mine.dim) != (theirs.space, theirs.dim):
        raise SylvieError(
            f"{name} would change which rows of the graph a tensor holds",
            where=caller_line(),
            remedy="use the function that returns a new tensor",
        )
    with torch._C.DisableTorchFunctionSubclass():
        target.copy_(result.local())
    target._memory.write(target.local(), theirs, f"{name} at {caller_line()}")
    return target


# --- attributes ----------------------------------------------------------------------------------------------------

_ACCESSORS = frozenset({"__get__", "__set__", "__delete__", "__dir__", "__format__"})


def _access(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An attribute: flags and types are every rank's own; a view of the rows (``x.T``) is a function like any other."""
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    if func.__name__ == "__get__" and isinstance(found, Tensor):
        return run(func, args, kwargs)
    return found
