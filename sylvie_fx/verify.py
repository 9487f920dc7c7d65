"""verify(): k simulated ranks in one process against the unmodified model on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sylvie_fx.api import DistributedModule
from sylvie_fx.arguments import check_model
from sylvie_fx.engine import ProgramCache
from sylvie_fx.holdings import copy_model
from sylvie_fx.ir import ops
from sylvie_fx.ir.errors import CaptureError, CommError, KernelError, SylvieError, VerifyError
from sylvie_fx.ir.options import Options
from sylvie_fx.ir.placement import Rows
from sylvie_fx.ir.program import Program, placement
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.passes.manager import PassManager
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.machine import dropout_key
from sylvie_fx.runtime.transport import Transport

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest relative difference that counts as exact: what reordering a float sum of the graphs at hand explains."""


@dataclass
class VerifyReport:
    """What verify() found.

    Attributes:
        refused: The message with which the model was refused, or None.
        per_tensor: Relative difference of the loss, of every gradient, and of every buffer, by name.
        tolerance: What counts as exact.
        parts: Number of simulated ranks.
        program: Text of the rewritten program.
        table: explain()'s table of exchanges.
        bytes_sent: Payload bytes that all ranks sent together.
    """

    parts: int
    tolerance: float
    refused: str | None = None
    per_tensor: dict[str, float] = field(default_factory=dict)
    program: str = ""
    table: str = ""
    bytes_sent: int = 0

    @property
    def largest(self) -> float:
        """The largest relative difference; infinite if the model was refused or a value is not finite."""
        if self.refused is not None:
            return float("inf")
        return max((d if d == d else float("inf") for d in self.per_tensor.values()), default=0.0)

    @property
    def exact(self) -> bool:
        """Whether every difference is within the tolerance."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        if self.refused is not None:
            return f"refused: {self.refused}"
        worst = max(self.per_tensor, key=lambda k: self.per_tensor[k], default="nothing")
        gradients = max((d for k, d in self.per_tensor.items() if k.startswith("gradient ")), default=0.0)
        losses = max((d for k, d in self.per_tensor.items() if k.startswith("loss")), default=0.0)
        verdict = "exact" if self.exact else "NOT exact"
        return (
            f"{verdict} on {self.parts} parts: largest relative difference {self.largest:.2e} ({worst}), "
            f"loss {losses:.2e}, gradients {gradients:.2e}, tolerance {self.tolerance:.0e}"
        )


def verify(
    model: nn.Module,
    *data: Any,
    parts: int = 4,
    loss: Callable[..., Tensor] | None = None,
    partition: Any = None,
    steps: int = 1,
    kinds: Any = None,
    passes: PassManager | None = None,
    tolerance: float | None = None,
    timeout: float = 120.0,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    options: Options | None = None,
) -> VerifyReport:
    """Compare ``parts`` simulated ranks with the unmodified model on one device, in the model's present mode.

    Dropout is compared with the same masks: on one device they are drawn by global row as the ranks draw them.

    Args:
        model: The unmodified model; it is copied, not changed.
        *data: What ``shard`` takes. Without ``loss`` also the arguments of the model.
        parts: Number of ranks.
        loss: ``loss(model, *data) -> scalar``; runs the model. By default the sum of a smooth function of every output.
        partition: As for ``shard``.
        steps: Training steps; between steps ``optimizer`` moves the parameters (default Adam with learning rate 0.01).
            The loss of every step is compared, the gradients of the last, and the buffers after the first; neither
            parameters nor later buffers, since Adam turns a gradient that is zero but for rounding (of a bias in front
            of a batch norm) into a step of full length, which running statistics then see.
        kinds: As for ``shard``.
        passes: The pipeline.
        tolerance: Largest relative difference that counts as exact; by default that of the model's dtype.
        timeout: Seconds until a simulated rank that waits gives up.
        optimizer: Makes an optimizer of parameters.
        options: Options of the ranks.

    Raises:
        Exception: What the unmodified model itself raises on this data.
    """
    check_model(model)
    run = loss or _default_loss
    make = optimizer or (lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.get_default_dtype())
    report = VerifyReport(parts, tolerance if tolerance is not None else TOLERANCE.get(dtype, 1e-2))
    chosen, cache = options or Options(timeout=timeout), ProgramCache()

    def rank(transport: Transport) -> tuple[_Trace, DistributedModule]:
        own = copy_model(model)
        own.train(model.training)
        distributed = DistributedModule(own, chosen, passes or default_passes(), transport, cache)
        sharded = distributed.shard(*data, partition=partition, kinds=kinds)
        sharded = (sharded,) if len(data) == 1 else sharded
        return _train(distributed, own, sharded, run, make, steps), distributed

    try:
        results = run_ranks(parts, rank, timeout)
    except SylvieError as error:
        found = _refusal(error)
        if found is None:
            raise
        report.refused = str(found)
        return report
    program = results[0][1].program("train" if model.training else "eval")
    reference = copy_model(model)
    reference.train(model.training)
    with keyed_masks(program, chosen.seed) as masks:
        expected = _train(reference, reference, data, run, make, steps, masks)
    _compare(report, expected, [trace for trace, _ in results])
    report.program, report.table = str(program), results[0][1].explain()
    report.bytes_sent = sum(d.transport.bytes_sent for _, d in results)
    return report


@dataclass
class _Trace:
    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def _train(
    call: nn.Module,
    own: nn.Module,
    data: tuple[Any, ...],
    run: Callable[..., Tensor],
    make: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    masks: KeyedMasks | None = None,
) -> _Trace:
    trainable = [p for p in own.parameters() if p.requires_grad]
    optimizer = make(trainable) if trainable and steps > 1 else None
    inputs = [t for t in pytree.tree_leaves(data) if isinstance(t, Tensor) and t.requires_grad]
    losses: list[Tensor] = []
    buffers: dict[str, Tensor] = {}
    for step in range(steps):
        if masks is not None:
            masks.start(step)
        if optimizer is not None:
            optimizer.zero_grad()
        value = run(call, *data)
        if value.requires_grad:
            value.backward()
        losses.append(value.detach())
        if step == 0:
            buffers = {name: b.detach().clone() for name, b in own.named_buffers() if b.layout is torch.strided}
        if optimizer is not None:
            optimizer.step()
    gradients = {n: p.grad if p.grad is None else p.grad.to_dense() for n, p in own.named_parameters()}
    for i, t in enumerate(inputs):
        whole = t.grad
        if isinstance(t, NodeTensor) and whole is not None:
            from sylvie_fx.node_tensor import node_tensor

            plain = whole.as_subclass(torch.Tensor)
            whole = node_tensor(plain, t._sharding, t._engine).full()
        gradients[f"input {i}"] = whole
    return _Trace(losses, gradients, buffers)


def _default_loss(model: nn.Module, *data: Any) -> Tensor:
    """The sum of a smooth function of every floating-point output: every entry has a gradient of its own."""
    total: Any = None
    for value in pytree.tree_leaves(model(*data)):
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            term = torch.sin(value * 1.7 + 0.3).sum()
            total = term if total is None else total + term
    if total is None:
        raise CaptureError("the model returns no floating-point tensor", remedy="give verify() a loss(model, *data)")
    return total  # type: ignore[no-any-return]


def _refusal(error: BaseException) -> SylvieError | None:
    """The refusal of the model inside an error that a rank raised; None for faults of the runtime."""
    while error is not None:
        if isinstance(error, SylvieError) and not isinstance(error, (CommError, KernelError, VerifyError)):
            return error
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return None


def _compare(report: VerifyReport, expected: _Trace, ranks: list[_Trace]) -> None:
    scale = max((float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()), default=0.0)
    for trace in ranks:
        for step, (a, b) in enumerate(zip(expected.losses, trace.losses, strict=True)):
            _note(report, f"loss {step}", a, b, 0.0)
        for name, gradient in expected.gradients.items():
            # A gradient that is zero but for rounding is compared with a thousandth of the largest gradient.
            _note(report, f"gradient {name}", gradient, trace.gradients.get(name), scale * 1e-3)
        for name, buffer in expected.buffers.items():
            _note(report, f"buffer {name}", buffer, trace.buffers.get(name), 1e-3)


def _note(report: VerifyReport, name: str, expected: Tensor | None, found: Tensor | None, floor: float) -> None:
    difference = relative_difference(expected, found, floor)
    report.per_tensor[name] = max(report.per_tensor.get(name, 0.0), difference, key=lambda d: (d != d, d))


def relative_difference(expected: Tensor | None, found: Tensor | None, floor: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute value (or ``floor``, if that is larger).

    A missing gradient equals a zero one; equal non-finite values are equal.
    """
    if expected is None or found is None:
        present = expected if expected is not None else found
        return 0.0 if present is None or not present.any() else float("inf")
    if expected.shape != found.shape:
        return float("inf")
    a, b = expected.detach().to(torch.float64), found.detach().to(torch.float64)
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    finite = a.isfinite()
    size = max(float(a[finite].abs().max()) if bool(finite.any()) else 0.0, floor, 1e-300)
    return float((a - b)[~same].abs().max()) / size


class KeyedMasks(TorchFunctionMode):
    """Runs the dropouts of an unmodified model on one device with the masks that the ranks use.

    Args:
        dims: For each call site the dimension that carries rows.
        seed: Seed of the masks.
    """

    def __init__(self, dims: dict[int, int], seed: int) -> None:
        super().__init__()
        self.dims, self.seed, self.step, self.site = dims, seed, 0, 0

    def start(self, step: int) -> None:
        """Begin a training step."""
        self.step, self.site = step, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace dropout; everything else runs as it is."""
        kwargs = kwargs or {}
        if func is F.dropout or func is torch.dropout:
            return self._dropout(*args, **kwargs)
        if func is torch.dropout_:
            return self._dropout(*args, **{**kwargs, "inplace": True})
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
    ) -> Tensor:
        active = training if train is None else train
        if not active or p == 0.0:
            return input
        site, dim = self.site, self.dims.get(self.site, 0)
        self.site += 1
        key = dropout_key(self.seed, self.step, site)
        shaped = input if input.dim() else input.view(1)
        keys = torch.arange(shaped.shape[dim], device=input.device)
        dropped = ops.keyed_dropout(shaped, keys, p, key, dim).view(input.shape)
        return input.copy_(dropped) if inplace else dropped


@contextmanager
def keyed_masks(program: Program, seed: int) -> Iterator[KeyedMasks]:
    """Within it, dropouts of the original model draw the masks of the distributed program."""
    dims = {}
    for node in program.graph.nodes:
        if node.target is ops.node_dropout:
            place = placement(node)
            dims[int(node.args[3])] = place.dim if isinstance(place, Rows) else 0
    with KeyedMasks(dims, seed) as mode:
        yield mode
