"""Loss and metric lines on sharded results give the one-device number on every rank, and its gradients."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sylvie_fx import node_tensor
from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import Function, ProgramCache
from sylvie_fx.ir.errors import SylvieError
from sylvie_fx.ir.options import Options
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

PARTS, NODES, EDGES = 3, 17, 40
CACHE = ProgramCache()  # every case calls the same model: it is captured once


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        h = self.lin(x)
        return h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]] * weight[:, None])


@dataclass
class Run:
    """What a line of a script has at hand."""

    model: Any
    out: Any
    x: Any
    edge_weight: Any
    y: Any
    mask: Any
    ids: Any
    extra: nn.Parameter
    classes: Tensor


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    mask = torch.rand(NODES) < 0.5
    mask[0] = True
    data = {
        "x": torch.randn(NODES, 5, dtype=torch.float64),
        "edge_index": torch.randint(0, NODES, (2, EDGES)),
        "edge_weight": torch.rand(EDGES, dtype=torch.float64),
        "y": torch.randint(0, 3, (NODES,)),
        "mask": mask,
        "ids": torch.randperm(NODES)[:6],
    }
    return Model(), data


def make(model: Any, x: Any, edge_index: Any, edge_weight: Any, y: Any, mask: Any, ids: Any) -> Run:
    extra = nn.Parameter(torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64))
    classes = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    return Run(model, model(x, edge_index, edge_weight), x, edge_weight, y, mask, ids, extra, classes)


def on_ranks(case: tuple[nn.Module, dict[str, Tensor]], fn: Callable[[Run], Any], parts: int = PARTS) -> list[Any]:
    model, data = case

    def rank(transport: Any) -> Any:
        distributed = DistributedModule(copy.deepcopy(model), Options(timeout=60), default_passes(), transport, CACHE)
        return fn(make(distributed, *distributed.shard(*data.values(), partition="random")))

    return run_ranks(parts, rank, 60)


def on_one_device(case: tuple[nn.Module, dict[str, Tensor]], fn: Callable[[Run], Any]) -> Any:
    model, data = case
    return fn(make(copy.deepcopy(model), *data.values()))


# --- lines whose value and gradients are compared ------------------------------------------------------------------


def in_place(r: Run) -> Tensor:
    z = r.out * 1
    z += r.out
    z[:, 0] = 0
    z[r.mask] *= 2
    z.clamp_(-1, 5)
    return (z * z).sum()


def accumulated(r: Run) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for factor in (1.0, 2.0):
        total += F.cross_entropy(r.out[r.mask] * factor, r.y[r.mask])
    return total


def regularised(r: Run) -> Tensor:
    return F.cross_entropy(r.out, r.y) + 0.01 * sum((p**2).sum() for p in r.model.parameters())


def evaluated(r: Run) -> float:
    with torch.no_grad():
        prediction = r.out[r.mask].max(dim=1).indices
    return float(prediction.eq(r.y[r.mask]).sum()) / len(r.y[r.mask])


LINES: dict[str, Callable[[Run], Any]] = {
    "cross entropy by mask": lambda r: F.cross_entropy(r.out[r.mask], r.y[r.mask]),
    "cross entropy by ids": lambda r: nn.CrossEntropyLoss()(r.out[r.ids], r.y[r.ids]),
    "class weights": lambda r: F.cross_entropy(r.out[r.mask], r.y[r.mask], weight=r.classes, label_smoothing=0.1),
    "no reduction": lambda r: (F.cross_entropy(r.out, r.y, reduction="none") * r.mask).sum() / r.mask.sum(),
    "nll": lambda r: F.nll_loss(F.log_softmax(r.out, dim=-1)[~r.mask], r.y[~r.mask]),
    "bce": lambda r: F.binary_cross_entropy_with_logits(r.out, F.one_hot(r.y, 3).to(r.out.dtype)),
    "flattened": lambda r: (
        F.binary_cross_entropy_with_logits(r.out.view(-1), F.one_hot(r.y, 3).to(r.out.dtype).view(-1))
        + r.out.flatten().mean()
    ),
    "joined": lambda r: (
        F.cross_entropy(torch.cat([r.out[r.mask], r.out[~r.mask]]), torch.cat([r.y[r.mask], r.y[~r.mask]]))
        + torch.cat([r.out[r.mask], r.out]).mean()
    ),
    "nodes and edges joined": lambda r: torch.cat([r.out[:, 0], r.edge_weight]).mean(),
    "mse": lambda r: F.mse_loss(r.out[:, :1].squeeze(-1), r.y.to(r.out.dtype)),
    "centred": lambda r: ((r.out - r.out.mean(0)) ** 2).mean() + r.out.std(),
    "masks combined": lambda r: r.out[r.mask & (r.y > 0)].sum(),
    "mask of features": lambda r: r.out[r.out[:, 0] > 0].sum(),
    "nonzero": lambda r: F.cross_entropy(r.out[r.mask.nonzero().squeeze()], r.y[torch.where(r.mask)[0]]),
    "looked up": lambda r: (
        torch.isin(r.y, torch.tensor([0, 2])).double().mean()
        + torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), r.out.detach()).double().mean()
    ),
    "masked_select": lambda r: r.out[:, 0].masked_select(r.mask).sum(),
    "slice": lambda r: F.cross_entropy(r.out[2:11], r.y[2:11]) + r.out[:, :2].sum() + r.out[::3].sum(),
    "index_select": lambda r: r.out.index_select(0, r.ids).sum(),
    "masked twice": lambda r: r.out[r.mask][r.y[r.mask] == 1].sum(),
    "where": lambda r: torch.where(r.mask.unsqueeze(1), r.out, torch.zeros_like(r.out)).sum(),
    "by number of rows": lambda r: r.out.reshape(r.out.shape[0], -1).sum() / r.out.size(0) + r.out.mean() * len(r.out),
    "transposed": lambda r: (r.out.T.sum(1) * r.extra).sum() + r.out.t().mm(r.out).sum(),
    "softmax over nodes": lambda r: (F.softmax(r.out, dim=0) * r.out).sum() + torch.logsumexp(r.out, 0).sum(),
    "in place": in_place,
    "accumulated": accumulated,
    "regularised": regularised,
    "parameter outside": lambda r: F.cross_entropy(r.out * torch.sigmoid(r.extra), r.y) + r.extra.pow(2).sum(),
    "dropout that is off": lambda r: F.dropout(r.out, 0.5, training=False).sum(),
    "accuracy": lambda r: (r.out.argmax(dim=1) == r.y)[r.mask].float().mean(),
    "accuracy as a number": evaluated,
    "accuracy by item": lambda r: r.out.argmax(1)[r.mask].eq(r.y[r.mask]).sum().item() / int(r.mask.sum()),
    "double": lambda r: r.out[r.ids].max(1)[1].type_as(r.y).eq(r.y[r.ids]).double().sum() / len(r.ids),
    "formatted and compared": lambda r: float(f"{r.out.mean():.4f}") + (1 if r.out.sum() < 1e9 else 0),
    "any and all": lambda r: (r.out > 0).any().double() + (r.out > -99).all() + torch.isnan(r.out).any().item(),
    "detached": lambda r: (
        (r.out.data * 2).sum() + r.out.detach().clone().cpu().max() + copy.deepcopy(r.out.detach()).min()
    ),
}


def scored(line: Callable[[Run], Any]) -> Callable[[Run], tuple[float, list[Tensor | None]]]:
    def run(r: Run) -> tuple[float, list[Tensor | None]]:
        value = line(r)
        if isinstance(value, Tensor) and value.requires_grad:
            value.backward()
        with torch.no_grad():
            number = float(value)
        return number, [p.grad for p in (*r.model.parameters(), r.extra)]

    return run


@pytest.mark.parametrize("name", LINES)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_line(case: Any, name: str) -> None:
    number, gradients = on_one_device(case, scored(LINES[name]))
    for found, own in on_ranks(case, scored(LINES[name])):
        assert found == pytest.approx(number, rel=1e-10, abs=1e-12)
        for a, b in zip(own, gradients, strict=True):
            zero = torch.zeros(1, dtype=torch.float64)
            torch.testing.assert_close(zero if a is None else a, zero if b is None else b, rtol=1e-10, atol=1e-12)


# --- what the object answers ----------------------------------------------------------------------------------------


def test_shape_is_global_and_local_is_this_ranks(case: Any) -> None:
    def look(r: Run) -> tuple[Any, ...]:
        return tuple(r.out.shape), r.out.size(1), len(r.mask), r.y.numel(), tuple(r.out.local().shape), len(r.out.rows)

    found = on_ranks(case, look)
    assert {f[:4] for f in found} == {((NODES, 3), 3, NODES, NODES)}
    assert sum(f[4][0] for f in found) == NODES
    assert all(f[4][0] == f[5] for f in found)


def test_full_is_the_global_tensor(case: Any) -> None:
    expected = on_one_device(case, lambda r: (r.out.detach(), r.y[r.mask], r.out.detach()[r.ids]))
    for found in on_ranks(case, lambda r: (r.out.full(), r.y[r.mask].full(), r.out[r.ids].full())):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
            assert type(a) is Tensor


@pytest.mark.parametrize(("line", "message"), [
    (lambda r: r.out.detach().numpy(), r"numpy array .*\.full\(\)"),
    (lambda r: r.out.tolist(), r"the list .*\.full\(\)"),
    (lambda r: list(r.out), r"an iteration .*\.full\(\)"),
    (lambda r: r.out.item(), "the number"),
    (lambda r: r.out[[0, 3]], r"ids that are not sharded.*model\.shard"),
    (lambda r: r.out[torch.tensor([0, 3])], r"ids that are not sharded.*model\.shard"),
    (lambda r: bool(r.mask), "the number"),
    (lambda r: r.out + torch.ones(NODES, 3, dtype=torch.float64), r"shard the plain tensor of shape \(17, 3\)"),
    (lambda r: torch.ones(3, dtype=torch.float64).mul_(r.out), "the same on every rank"),
    (lambda r: r.out @ r.out.T, "dense"),
    (lambda r: r.out.sort(0), "sort"),
    (lambda r: r.out.unfold(0, 2, 1), "unfold works along the dimension that is spread"),
])  # fmt: skip
def test_refused_at_the_callers_line(case: Any, line: Callable[[Run], Any], message: str) -> None:
    with pytest.raises(SylvieError, match=message) as raised:
        on_ranks(case, line, 2)
    assert "test_node_tensor.py:" in str(raised.value)


def test_printing_keeps_to_local_rows(case: Any) -> None:
    for text in on_ranks(case, lambda r: repr(r.out)):
        assert text.startswith("NodeTensor(")
        assert "(17, 3) in all" in text


@pytest.mark.parametrize("save", [
    lambda t, path: torch.save(t, path), lambda t, path: torch.save({"epoch": 1, "out": [t]}, path),
    lambda t, path: pickle.dumps(t),
])  # fmt: skip
def test_saving_rows_of_one_rank_is_refused(case: Any, save: Callable[[Any, Any], Any], tmp_path: Any) -> None:
    with pytest.raises(SylvieError, match=r"test_node_tensor.py:\d+.*pickled or saved.*\.full\(\).*\.local\(\)"):
        on_ranks(case, lambda r: save(r.out.detach(), tmp_path / "out.pt"), 1)


def test_what_the_remedies_give_is_saved(case: Any, tmp_path: Any) -> None:
    def run(r: Run) -> tuple[Tensor, Any]:
        whole, path = r.out.full(), tmp_path / f"{r.out._engine.transport.rank}.pt"
        torch.save((whole, r.out.detach().local()), path)
        return whole, torch.load(path)

    for whole, (loaded, own) in on_ranks(case, run):
        assert torch.equal(loaded, whole)
        assert type(own) is Tensor


def test_a_shallow_copy_has_the_same_rows(case: Any) -> None:
    def run(r: Run) -> Tensor:
        copy.copy(r.y)[r.mask] = 0
        return r.y.sum() + copy.copy(r.x).sum()

    expected = on_one_device(case, run)
    for found in on_ranks(case, run):
        torch.testing.assert_close(found, expected)


def test_gradients_of_inputs(case: Any) -> None:
    model, data = case
    data = {
        **data,
        "x": data["x"].clone().requires_grad_(),
        "edge_weight": data["edge_weight"].clone().requires_grad_(),
    }

    def run(r: Run) -> list[Tensor]:
        loss = F.cross_entropy(r.out[r.mask], r.y[r.mask])
        by_function = torch.autograd.grad(loss, [r.x, r.model.lin.weight], retain_graph=True)
        loss.backward()
        found = [by_function[0], r.x.grad, r.edge_weight.grad]
        assert all(isinstance(g, NodeTensor) is isinstance(r.x, NodeTensor) for g in found)
        return [*[g.full() if isinstance(g, NodeTensor) else g for g in found], by_function[1]]

    expected = on_one_device((model, data), run)
    for found in on_ranks((model, data), run):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_hook_is_given_the_global_gradient(case: Any) -> None:
    model, data = case
    data = {**data, "x": data["x"].clone().requires_grad_()}

    def run(r: Run) -> list[Any]:
        seen: list[Any] = []

        def normalised(g: Tensor) -> Tensor:
            seen.append((tuple(g.shape), float(g.norm())))
            return g / g.norm() + g.mean(0)

        def counted(p: Tensor) -> None:
            seen.append(float(p.grad.sum()))  # type: ignore[union-attr]

        r.out.retain_grad()
        r.out.register_hook(normalised)
        r.out.register_hook(lambda g: seen.append(float(g.max())))
        r.x.register_hook(lambda g: g * 0).remove()
        r.x.register_hook(lambda g: g.clamp(max=0.01))
        r.x.register_post_accumulate_grad_hook(counted)
        F.cross_entropy(r.out[r.mask], r.y[r.mask]).backward()
        kept = [g.full() if isinstance(g, NodeTensor) else g for g in (r.out.grad, r.x.grad)]
        return [*kept, *[p.grad for p in r.model.parameters()], torch.tensor([s for s in seen if isinstance(s, float)]),
                torch.tensor([seen[0][1], *seen[0][0]])]  # fmt: skip

    expected = on_one_device((model, data), run)
    for found in on_ranks((model, data), run):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hook", [lambda g: g.sum(), lambda g: torch.ones(NODES, 3).double(), lambda g: g[1:]])
def test_other_rows_from_a_hook_are_refused(case: Any, hook: Callable[[Tensor], Tensor]) -> None:
    def run(r: Run) -> None:
        r.out.register_hook(hook)
        r.out.sum().backward()

    with pytest.raises(SylvieError, match=r"test_node_tensor.py:\d+.*a hook .* other rows than the gradient"):
        on_ranks(case, run, 2)


def test_several_backwards_accumulate(case: Any) -> None:
    def run(r: Run) -> list[Tensor | None]:
        F.cross_entropy(r.out[r.mask], r.y[r.mask]).backward(retain_graph=True)
        r.out.pow(2).mean().backward()
        return [p.grad for p in r.model.parameters()]

    expected = on_one_device(case, run)
    for found in on_ranks(case, run):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_flattened_and_joined_rows_are_counted_and_gathered(case: Any) -> None:
    def run(r: Run) -> list[tuple[int, ...] | Tensor]:
        mask = r.mask if isinstance(r.out, NodeTensor) else case[1]["mask"]
        made = [r.out.flatten(), torch.cat([r.out[mask], r.out[~mask]]), torch.cat([r.out[:, 0], r.edge_weight])]
        return [*(tuple(t.shape) for t in made), *(t.full() if isinstance(t, NodeTensor) else t.detach() for t in made)]

    expected = on_one_device(case, run)
    for found in on_ranks(case, run):
        assert found[:3] == expected[:3] == [(3 * NODES,), (NODES, 3), (NODES + EDGES,)]
        torch.testing.assert_close(found[3:], expected[3:], rtol=1e-10, atol=1e-12)


def test_dropout_outside_the_model_differs_from_call_to_call(case: Any) -> None:
    def run(r: Run) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(r.out.detach())
        return F.dropout(ones, 0.5).full(), F.dropout(ones, 0.5).full()

    (first, second), *others = on_ranks(case, run)
    assert not torch.equal(first, second)
    for other in others:
        assert torch.equal(other[0], first)


def test_new_masks_find_the_same_programs_and_their_spaces_are_forgotten(case: Any) -> None:
    def run(r: Run) -> tuple[int, int]:
        graph = r.x._sharding.graph
        before = None
        for seed in range(6):
            mask = torch.rand(NODES, generator=torch.Generator().manual_seed(seed))
            picked = r.x[:, 0] > mask.median()
            picked = picked if seed % 2 else ~picked
            F.mse_loss(r.out[picked], r.out[picked] * 2)
            before = len(CACHE.programs) if seed == 1 else before
        return len(CACHE.programs) - int(before or 0), len(graph.spaces)

    for grown, spaces in on_ranks(case, run, 1):
        assert grown == 0
        assert spaces == 3


def test_ranks_that_are_threads_agree_on_which_call_is_new(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Function):
        def __init__(self, function: Callable[..., Any]) -> None:
            time.sleep(0.2)  # long enough for every rank to ask for the module of a function that nobody has called yet
            super().__init__(function)

    monkeypatch.setattr(node_tensor, "Function", Slow)

    def run(r: Run) -> list[int]:
        counts = []
        for _ in range(2):
            F.softsign(r.out)
            counts.append(len(r.out._engine._bindings))
        return counts

    for first, second in on_ranks(case, run):
        assert first == second
