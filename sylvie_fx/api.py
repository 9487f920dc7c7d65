"""distribute(model) and what it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sylvie_fx.node_functions  # noqa: F401  what a NodeTensor answers
from sylvie_fx.arguments import check_model, options_from_environment
from sylvie_fx.baked import Baked
from sylvie_fx.capture.hooks import refuse_hooks
from sylvie_fx.capture.inputs import FlatCall, flatten_call
from sylvie_fx.clock import Clock
from sylvie_fx.debug import DebugOptions
from sylvie_fx.engine import Compiled, Engine, ProgramCache
from sylvie_fx.holdings import METHOD, Holdings, copy_model
from sylvie_fx.ir.errors import CaptureError, CommError, OptionError, PassError, SylvieError
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.program import Program
from sylvie_fx.kernels.aggregate_backend import kernel_name
from sylvie_fx.leaves import Leaf, Sharding
from sylvie_fx.methods import Methods, is_own
from sylvie_fx.node_tensor import leaf_of, node_tensor
from sylvie_fx.passes.manager import PassManager, Snapshot
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.profile import Profile
from sylvie_fx.report.explain import explain
from sylvie_fx.runtime.metered import MeteredTransport
from sylvie_fx.runtime.pages import give_back, keep_pages
from sylvie_fx.runtime.process_group import default_transport
from sylvie_fx.runtime.transport import Transport
from sylvie_fx.sharding import frontends, shard
from sylvie_fx.stats import Stats, uncoded_bytes


def distribute(
    model: nn.Module,
    *,
    passes: PassManager | None = None,
    transport: Transport | None = None,
    debug: DebugOptions | None = None,
    **options: Any,
) -> DistributedModule:
    """Distribute a full-graph GNN over the ranks of the process group, without editing it.

    Nothing is traced yet: the model is captured when the first call has shown the kinds of its inputs. Without a
    process group, and without torchrun's variables in the environment, there is one rank.

    Args:
        model: The unmodified module.
        passes: The pipeline; :func:`default_passes` by default.
        transport: How ranks talk; torch.distributed by default.
        debug: What to log; by default what ``SYLVIE_FX_*`` variables ask for.
        **options: Fields of :class:`Options`; ``SYLVIE_FX_BITS``, ``SYLVIE_FX_STALENESS`` and ``SYLVIE_FX_TIMEOUT``,
            which ``python -m sylvie_fx run`` sets, stand in for those that are not given.

    Raises:
        OptionError: An option is unknown or has a value that is not allowed.
    """
    check_model(model)
    known = [name for name in Options.__dataclass_fields__ if not name.startswith("_")]
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(f"unknown option {', '.join(unknown)}", remedy=f"choose from {', '.join(known)}")
    chosen = Options(**{**options_from_environment(), **options})
    debug = debug or DebugOptions.from_environment()
    pipeline = passes or default_passes()
    debug.check(pipeline.names)
    return DistributedModule(model, chosen, pipeline, transport or default_transport(chosen.timeout), debug=debug)


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
        debug: DebugOptions | None = None,
    ) -> None:
        super().__init__()
        keep_pages()
        options.check_modules({path for path, _ in model.named_modules(remove_duplicate=False)})
        self.module = model
        self.options = options
        self._engine = Engine(MeteredTransport(transport), options, passes, cache, debug)
        self.holdings = Holdings(model)
        self._baked = Baked(model)
        self._engine.call = self.holdings.call
        self._counted: Counter[Compiled] = Counter()
        self._clock = Clock(model)
        self._methods = Methods(model, self.holdings)
        self._last: dict[tuple[str, str], Compiled] = {}  # by method and mode

    @property
    def transport(self) -> Transport:
        """How ranks talk."""
        return self._engine.transport

    @property
    def engine(self) -> Engine:
        """Compiles and runs calls on this rank."""
        return self._engine

    def shard(self, *data: Any, partition: Any = None, kinds: Any = None) -> Any:
        """Keep this rank's rows of the data of one graph; see :func:`sylvie_fx.sharding.shard`."""
        sent = self.transport.messages_sent
        try:
            return shard(self, data, partition, kinds)
        except Exception as error:  # the others wait for this rank: they are told, whatever it was
            # What sharding refuses is in the data, which ranks have compared before it sends anything else.
            self._tell(error, alike=isinstance(error, SylvieError) or self.transport.messages_sent == sent)
            raise
        finally:
            give_back()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; without hooks not through nn.Module, whose call torch.export replaces while it captures."""
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's rows; results with a row per node or edge are :class:`NodeTensor`.

        Raises:
            CaptureError, PassError: The model can not be captured, or not distributed exactly.
            CommError: A peer failed.
        """
        return self._telling(lambda: self._prepare(args, kwargs)())

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """Capture a call; what is returned runs it."""
        engine, step = self._engine, self._clock.begin()

        def wrap(value: Tensor, sharding: Sharding, base: int | None) -> Tensor:
            return node_tensor(value, sharding, engine)

        if self.training and torch.is_grad_enabled() and engine.transport.recorder.on:
            engine.transport.mark(step)
        found, call, leaves = self._compile(args, kwargs, step)

        def run() -> Any:
            self._counted[found[0]] += 1
            return engine.run(self.module, found, leaves, call, self._clock.moment(step, found[0].draws), wrap)

        return run

    def _telling(self, run: Callable[[], Any]) -> Any:
        """Run something; tell the other ranks of an error."""
        sent = self._engine.transport.messages_sent
        try:
            return run()
        except Exception as error:  # the others wait for this rank: they are told, whatever it was
            self._tell(error, alike=self._engine.transport.messages_sent == sent)
            raise

    def _tell(self, error: Exception, *, alike: bool) -> None:
        """Tell the others of an error; one that they raise as well, before anything was sent, ends no group."""
        if self.transport.size > 1 and not isinstance(error, CommError):
            tell = self.transport.refuse if alike else self.transport.abort
            tell(f"{type(error).__name__}: {error}")

    def compile_call(self, *args: Any, **kwargs: Any) -> Compiled:
        """Capture and rewrite a call without running it; it is what :meth:`program` and :meth:`explain` then show."""
        return self._compile(args, kwargs, self._clock.step)[0][0]

    def _compile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int
    ) -> tuple[tuple[Compiled, Hashable], FlatCall, list[Leaf]]:
        """The program of a call; tables with a row for each node are node rows in it, or parameters where that fails."""
        mode = self._mode_key()
        call, leaves = self._flatten(args, kwargs, step)
        try:
            found = self._engine.compile(self.module, leaves, call, ("model", mode, self.holdings.lifting))
        except (CaptureError, PassError):
            if not self.holdings.lifting:
                raise
            self.holdings.lifting = False
            call, leaves = self._flatten(args, kwargs, step)
            found = self._engine.compile(self.module, leaves, call, ("model", mode, False))
        if self._baked.changed(found[0]):
            return self._compile(args, kwargs, step)
        self._last[kwargs.get(METHOD, "forward"), found[0].program.mode] = found[0]
        return found, call, leaves

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int) -> tuple[FlatCall, list[Leaf]]:
        call = flatten_call(args, {**kwargs, **self.holdings.arguments(self._engine, step)}, frontends())
        leaves = [leaf_of(path, value) for path, value in call.leaves]
        rows = self.holdings.graph.num_nodes if self.holdings.graph is not None else 0
        for leaf in leaves:
            if leaf.sharding is None and rows > 1 and rows in leaf.local.shape:
                raise CaptureError(
                    f"{leaf.path} has shape {tuple(leaf.local.shape)}: a row for each of the {rows} nodes, "
                    "but it is not sharded",
                    why="ranks hold their own rows of the other arguments",
                    remedy="pass it through model.shard(...) together with the graph",
                )
        if not any(leaf.sharding for leaf in leaves):
            raise CaptureError(
                "the model was called with data that is not sharded",
                why="every rank would compute on the whole graph",
                remedy="pass what data = model.shard(...) returned",
            )
        return call, leaves

    def _mode_key(self) -> Hashable:
        """What a program has baked in besides its inputs: modes, which parameters learn, and numbers of modules."""
        modules = list(self.module.modules())
        refuse_hooks(self.module, modules)
        frozen = tuple(p.requires_grad for p in self.module.parameters())
        return tuple(m.training for m in modules), frozen, self._baked.key(modules)

    def program(self, mode: str = "train", method: str = "forward") -> Program:
        """The rewritten program of the last call in a mode.

        Args:
            mode: ``train`` or ``eval``.
            method: Which method of the model was called.

        Raises:
            CaptureError: It has not been called in that mode yet, or runs operator by operator.
        """
        return self._compiled(method, mode).program

    @property
    def snapshots(self) -> list[Snapshot]:
        """The forward program after every pass, of the mode the model is in (or of the only one captured)."""
        return self._compiled("forward", self._shown_mode("forward")).snapshots

    def _shown_mode(self, method: str) -> str:
        mode = "train" if self.training else "eval"
        return mode if (method, mode) in self._last else next((m for n, m in self._last if n == method), mode)

    def _compiled(self, method: str, mode: str) -> Compiled:
        if (method, mode) not in self._last:
            called = "the model" if method == "forward" else method
            of = "" if method == "forward" else f" of {method}"
            raise CaptureError(f"there is no {mode} program{of} yet", remedy=f"call {called} once in {mode} mode")
        return self._last[method, mode]

    def explain(self, mode: str | None = None) -> str:
        """The exchanges as a table, one for forward and each other method that was called, in a mode where it has been.

        See :func:`sylvie_fx.report.explain.explain`.
        """
        refused = self._methods.refused
        methods = [*dict.fromkeys(name for name, _ in self._last)] or ([] if refused else ["forward"])
        modes = [mode if mode and (name, mode) in self._last else self._shown_mode(name) for name in methods]
        tables = [self._explained(name, shown) for name, shown in zip(methods, modes, strict=True)]
        return "".join([*tables, *(f"{name} runs operator by operator: {e}\n" for name, e in refused.items())])

    def _explained(self, method: str, mode: str) -> str:
        compiled = self._compiled(method, mode)
        bound = next((b for p, b in self._engine.bound() if p is compiled.program), None)
        notes = self._engine.notes(compiled.program)
        lines = [f"captured again, on the whole graph: {compiled.again}"] if compiled.again else []
        if self.transport.size > 1:
            lines.append(f"what crosses was chosen for a link of {self._engine.link}")
        lines += ["at run time:", *(f"  {note}" for note in notes)] if notes else []
        same = self._engine.transport.same_host() if compiled.program.near and bound is not None else None
        return explain(compiled.program, bound, self.options, kernel_name, same, method) + "".join(
            f"{line}\n" for line in lines
        )

    @property
    def stats(self) -> Stats:
        """Counters of this rank since the start or the last :meth:`reset_stats`."""
        bound = {id(program): b for program, b in self._engine.bound()}
        uncoded = sum(
            calls * uncoded_bytes(c.program, bound[id(c.program)])
            for c, calls in self._counted.items()
            if id(c.program) in bound
        )
        wire = self._engine.transport
        return Stats(
            **vars(wire.meter), **vars(wire.counters.read()), bytes_float32=uncoded, calls=self._counted.total()
        )

    def profile(self) -> Profile:
        """Record what every rank does in a ``with`` block, which all ranks must enter and leave together.

        Example::

            with model.profile() as p:
                for _ in range(3):
                    step()
            p.save("timeline.json")  # for ui.perfetto.dev or chrome://tracing
            p.figure("timeline.png")
        """
        return Profile(self._engine.transport)

    def reset_stats(self) -> None:
        """Count from zero."""
        self._engine.transport.reset()
        self._counted.clear()

    # --- the original module's names -----------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The original module's mode, which its methods may set."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__.get("_modules", {}):  # nn.Module sets it first of all
            self.module.training = mode

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

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedModule:
        """A copy of the model that shares the transport and the programs; it has no sharded graphs yet."""
        engine = self._engine
        copied = DistributedModule(
            copy_model(self.module, memo),
            self.options,
            engine.passes,
            engine.transport.inner,
            engine.cache,
            engine.debug,
        )
        copied.holdings.copy_from(self.holdings)
        copied._clock.copy_from(self._clock)
        copied._baked.copied_from(self._baked)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a process group can not be written to a file."""
        raise SylvieError(
            "a distributed model can not be pickled",
            why="it holds connections to the other ranks",
            remedy="save model.state_dict(), or model.module, the original model",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that the original module has are set on it."""
        module = self.__dict__.get("_modules", {}).get("module")
        own = name in self.__dict__ or hasattr(type(self), name) or name == "module"
        if module is not None and not own and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the original module; its public methods, on sharded tensors, run as forward does."""
        if name == "module":
            # Not through nn.Module: while a rank in another thread captures, torch.export has replaced its lookups.
            return self.__dict__["_modules"]["module"]
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
        if not is_own(self.module, name):
            return found
        return self._methods.wrapped(name, self._prepare, self._telling)
