"""distribute(model) and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sylvie_fx.node_functions  # noqa: F401  what a NodeTensor answers
from sylvie_fx.capture.held import HeldGraph, find_held, replaced
from sylvie_fx.capture.inputs import FlatCall, flatten_call
from sylvie_fx.engine import Compiled, Engine, ProgramCache
from sylvie_fx.ir.errors import CaptureError, OptionError
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.program import Program
from sylvie_fx.leaves import Leaf, Sharding
from sylvie_fx.node_tensor import leaf_of, node_tensor
from sylvie_fx.passes.manager import PassManager, Snapshot
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.process_group import default_transport
from sylvie_fx.runtime.transport import Transport

_HELD = "_held_graphs"


def distribute(
    model: nn.Module,
    *,
    passes: PassManager | None = None,
    transport: Transport | None = None,
    **options: Any,
) -> DistributedModule:
    """Distribute a full-graph GNN over the ranks of the process group, without editing it.

    Nothing is traced yet: the model is captured when the first call has shown the kinds of its inputs. Without a
    process group, and without torchrun's variables in the environment, there is one rank.

    Args:
        model: The unmodified module.
        passes: The pipeline; :func:`default_passes` by default.
        transport: How ranks talk; torch.distributed by default.
        **options: Fields of :class:`Options`.

    Raises:
        OptionError: An option is unknown or has a value that is not allowed.
    """
    if isinstance(model, DistributedModule):
        raise OptionError("the model is distributed already", remedy="call distribute() once, on the original model")
    try:
        chosen = Options(**options)
    except TypeError:
        unknown = sorted(set(options) - set(Options.__dataclass_fields__))
        raise OptionError(
            f"unknown option {', '.join(unknown)}", remedy=f"choose from {', '.join(Options.__dataclass_fields__)}"
        ) from None
    return DistributedModule(model, chosen, passes or default_passes(), transport or default_transport(chosen.timeout))


class DistributedModule(nn.Module):
    """A model that runs on this rank's rows of a sharded graph.

    Parameters, buffers and ``state_dict()`` are the original module's, under the original names.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        passes: PassManager,
        transport: Transport,
        cache: ProgramCache | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.training = model.training
        self.options = options
        self._engine = Engine(transport, options, passes, cache)
        self._engine.call = self._call_module
        self.held: list[HeldGraph] = find_held(model)
        self._sharded_held: dict[int, Any] = {}
        self._step = 0
        self._last: dict[str, Compiled] = {}

    @property
    def transport(self) -> Transport:
        """How ranks talk."""
        return self._engine.transport

    @property
    def engine(self) -> Engine:
        """Compiles and runs calls on this rank."""
        return self._engine

    def adopt(self, sharded: dict[int, Any]) -> None:
        """Take over the sharded counterparts of graphs that the model holds, by the id of the original."""
        self._sharded_held.update(sharded)

    def _call_module(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model with stand-ins in the place of the graphs that it holds."""
        stand_ins = kwargs.pop(_HELD, None)
        if stand_ins is None:
            return model(*args, **kwargs)
        held = find_held(model)
        with replaced(held, stand_ins):
            return model(*args, **kwargs)

    def shard(self, *data: Any, partition: Any = None, kinds: Any = None) -> Any:
        """Keep this rank's rows of the data of one graph; see :func:`sylvie_fx.sharding.shard`."""
        from sylvie_fx.sharding import shard

        return shard(self, data, partition, kinds)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's rows; results with a row per node or edge are :class:`NodeTensor`.

        Raises:
            CaptureError, PassError: The model can not be captured, or not distributed exactly.
            CommError: A peer failed.
        """
        call, leaves = self._flatten(args, kwargs)
        graph_engine = self._engine

        def wrap(value: Tensor, sharding: Sharding) -> Tensor:
            return node_tensor(value, sharding, graph_engine)

        key = ("model", self._mode_key())
        step = self._step
        if self.training and torch.is_grad_enabled():
            self._step += 1
        try:
            compiled, _ = self._engine.compile(self.module, leaves, call, key)
            self._last[compiled.program.mode] = compiled
            return self._engine.run(self.module, leaves, call, key, step, wrap)
        except Exception as error:
            self.transport.abort(f"{type(error).__name__}: {error}")
            raise

    def compile_call(self, *args: Any, **kwargs: Any) -> Compiled:
        """Capture and rewrite a call without running it; it is what :meth:`program` and :meth:`explain` then show."""
        call, leaves = self._flatten(args, kwargs)
        compiled, _ = self._engine.compile(self.module, leaves, call, ("model", self._mode_key()))
        self._last[compiled.program.mode] = compiled
        return compiled

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[FlatCall, list[Leaf]]:
        from sylvie_fx.sharding import frontends

        if self.held:
            missing = [str(h) for h in self.held if id(h.value) not in self._sharded_held]
            if missing:
                raise CaptureError(
                    f"{', '.join(missing)} holds a graph that is not sharded",
                    remedy="call data = model.shard(...) on the node data first: it shards the held graph too",
                )
            kwargs = {**kwargs, _HELD: [self._sharded_held[id(h.value)] for h in self.held]}
        call = flatten_call(args, kwargs, frontends())
        leaves = [leaf_of(path, value) for path, value in call.leaves]
        if not any(leaf.sharding for leaf in leaves):
            raise CaptureError(
                "the model was called with data that is not sharded",
                why="every rank would compute on the whole graph",
                remedy="pass what model.shard(...) returned",
            )
        graph = next(leaf.sharding.graph for leaf in leaves if leaf.sharding)
        for leaf in leaves:
            if leaf.sharding is None and graph.num_nodes in leaf.local.shape and graph.num_nodes > 1:
                raise CaptureError(
                    f"{leaf.path} has shape {tuple(leaf.local.shape)}: a row for each of the {graph.num_nodes} nodes, "
                    "but it is not sharded",
                    why="ranks hold their own rows of the other arguments",
                    remedy="pass it through model.shard(...) together with the graph",
                )
        return call, leaves

    def _mode_key(self) -> Any:
        frozen = tuple(p.requires_grad for p in self.module.parameters())
        return tuple(m.training for m in self.module.modules()), frozen

    def program(self, mode: str = "train") -> Program:
        """The rewritten program of the last call in a mode.

        Args:
            mode: ``train`` or ``eval``.

        Raises:
            CaptureError: The model has not been called in that mode yet.
        """
        return self._compiled(mode).program

    @property
    def snapshots(self) -> list[Snapshot]:
        """The program after every pass, of the mode the model is in (or of the only one captured)."""
        mode = "train" if self.training else "eval"
        return self._compiled(mode if mode in self._last else next(iter(self._last), mode)).snapshots

    def _compiled(self, mode: str) -> Compiled:
        if mode not in self._last:
            raise CaptureError(f"there is no {mode} program yet", remedy=f"call the model once in {mode} mode")
        return self._last[mode]

    def explain(self, mode: str | None = None) -> str:
        """The exchanges as a table; see :func:`sylvie_fx.report.explain.explain`."""
        from sylvie_fx.report.explain import explain

        mode = mode or ("train" if self.training else "eval")
        if mode not in self._last and self._last:
            mode = next(iter(self._last))
        compiled = self._compiled(mode)
        bound = next((b for p, b in self._engine.bound() if p is compiled.program), None)
        return explain(compiled.program, bound, self.options)

    # --- the original module's names -----------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original module's state under its original keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the original module."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The original parameters under their original names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The original buffers under their original names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
