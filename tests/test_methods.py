"""Methods other than forward, called on the distributed model: programs of their own, with the numbers of one device."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sylvie_fx.api import DistributedModule
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.errors import CaptureError, PassError
from sylvie_fx.ir.options import Options
from sylvie_fx.node_tensor import NodeTensor
from sylvie_fx.passes.pipeline import default_passes
from sylvie_fx.runtime.in_process import run_ranks

NODES, EDGES = 19, 50


class Auto(nn.Module):
    """A graph auto-encoder with the methods that scripts give it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 32), nn.Linear(32, 32)
        self.z: Any = None
        self.seen: list[Any] = []

    def encode(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.one(x)
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        h = self.two(h.relu())
        return h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

    @staticmethod
    def decode(z: Tensor, edges: Tensor) -> Tensor:
        return (z[edges[0]] * z[edges[1]]).sum(-1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.encode(x, edges)

    def loss(self, x: Tensor, edges: Tensor) -> tuple[Tensor, dict[str, Any]]:
        scores = self.decode(self(x, edges), edges)
        return F.softplus(-scores).mean(), {"scores": scores, "name": "softplus", "none": None}

    def remember(self, x: Tensor, edges: Tensor) -> None:
        self.z = self.encode(x, edges)

    def remembered(self) -> Tensor:
        return self.z.pow(2).mean()  # type: ignore[no-any-return]

    def collect(self, x: Tensor, edges: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        return self.encode(x, edges)

    def gather(self, x: Tensor, edges: Tensor, into: list[Any]) -> Tensor:
        into.append(len(into))
        return self.encode(x, edges)

    @torch.no_grad()
    def test(self, x: Tensor, edges: Tensor) -> Tensor:
        self.eval()
        return self.encode(x, edges).mean()

    @torch.no_grad()
    def look(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.encode(x, edges)

    def fit(self, x: Tensor, edges: Tensor, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = F.softplus(-self.decode(self.encode(x, edges), edges)).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def fit_by_hand(self, x: Tensor, edges: Tensor, optimizer: torch.optim.Optimizer) -> float:
        loss = self.encode(x, edges).pow(2).mean()
        learned = list(self.parameters())
        for parameter, gradient in zip(learned, torch.autograd.grad(loss, learned), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return float(loss.detach())

    def show(self, x: Tensor, edges: Tensor, lines: Callable[[str], None]) -> None:
        lines(f"{self.encode(x, edges).mean().detach():.9f}")

    @property
    def width(self) -> int:
        return self.one.out_features

    def rounds(self, x: Tensor, edges: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            x = x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            yield x

    async def later(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.encode(x, edges)

    def ordered(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.encode(x, edges).sort(0).values

    def twice(self, number: int) -> int:
        return 2 * number


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, NODES, (2, EDGES), generator=generator)


def make() -> Auto:
    torch.manual_seed(0)
    return Auto().double()


def on_ranks(script: Callable[..., Any], model: nn.Module | None = None, parts: int = 2, **options: Any) -> list[Any]:
    model, cache = model or make(), ProgramCache()

    def rank(transport: Any) -> Any:
        net = DistributedModule(
            copy.deepcopy(model), Options(timeout=30, **options), default_passes(), transport, cache
        )
        found = script(net, *net.shard(*data(), partition="random"))
        return [t.full() if isinstance(t, NodeTensor) else t for t in found]

    return run_ranks(parts, rank, 30)


def same(script: Callable[..., Any], model: nn.Module | None = None, parts: int = 2) -> None:
    expected = script(copy.deepcopy(model or make()), *data())
    for found in on_ranks(script, model, parts):
        for one, other in zip(found, expected, strict=True):
            if isinstance(other, (Tensor, float)):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
            else:
                assert one == other


def gradients(net: Any) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def captured(net: Any, *methods: str) -> None:
    if isinstance(net, DistributedModule):
        text = net.explain()
        assert "operator by operator" not in text
        for method in methods:
            assert f"of {method}" in " ".join(text.split())


@pytest.mark.parametrize("parts", [2, 4])
def test_encode_and_decode_train(parts: int) -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            z = net.encode(x, edges)
            scores = net.decode(z, edges=edges)
            loss = F.softplus(-scores).mean()
            loss.backward()
            optimizer.step()
        captured(net, "encode", "decode")
        return [z.detach(), scores.detach(), loss.detach(), *gradients(net), *(p.detach() for p in net.parameters())]

    same(script, parts=parts)


def test_methods_call_each_other_and_return_what_they_like() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        loss, more = net.loss(x, edges)
        loss.backward()
        looked = net.look(x, edges)
        assert not looked.requires_grad
        captured(net, "loss", "look")
        net.eval()
        more["evaluated"] = net.encode(x, edges).detach()
        captured(net, "encode")
        return [loss.detach(), more["scores"].detach(), more["name"], more["none"], more["evaluated"], looked,
                *gradients(net), net.twice(2)]  # fmt: skip

    same(script)


POLICY = {"intra_host": {"bits": 32}, "inter_host": {"bits": 1, "staleness": 1}}


@pytest.mark.parametrize("options", [{}, {"bits": 1}, {"bits": 1, "staleness": 1}, {"policy": POLICY}], ids=str)
def test_a_method_is_exchanged_and_counted_as_forward_is(options: dict[str, Any]) -> None:
    def script(net: Any, x: Any, edges: Any, name: str) -> list[Any]:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(7):  # rows are old from the sixth step on
            z = getattr(net, name)(x, edges)
            z.pow(2).mean().backward()
            optimizer.step()
        counted = net.stats
        sizes = counted.bytes_sent, counted.bytes_float32, counted.exchanges, counted.calls
        return [z.detach(), *sizes, *counted.staleness.values()]

    by_method, by_forward = (
        on_ranks(lambda *given, name=name: script(*given, name=name), **options) for name in ("encode", "forward")
    )
    torch.testing.assert_close(by_method, by_forward, rtol=0, atol=0)
    assert by_method[0][4] == 7
    assert (len(by_method[0]) > 6) == (len(options) > 1 or "policy" in options)  # some were old


def test_rows_of_a_step_of_two_methods_are_no_older_than_allowed() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(10):
            optimizer.zero_grad()
            loss = F.softplus(-net.decode(net.encode(x, edges), edges)).mean()
            loss.backward()
            optimizer.step()
        return [loss.detach(), net.stats.staleness]

    for (exact, _), (late, ages) in zip(on_ranks(script), on_ranks(script, staleness=1), strict=True):
        torch.testing.assert_close(late, exact, rtol=1e-3, atol=0)
        assert set(ages) == {0, 1}


def test_a_method_that_writes_state_writes_it_every_time() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        found, given = [], []
        for scale in (1, 2):
            net.remember(scale * x, edges)
            found += [net.remembered().detach(), net.collect(x, edges).detach(), list(net.seen)]
            found += [net.gather(x, edges, given).detach(), list(given)]
        return found

    same(script)


def test_a_method_without_a_result_does_what_it_does_every_time() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        shown: list[str] = []
        for scale in (1, 2):
            net.show(scale * x, edges, shown.append)
        return [shown]

    same(script)


def test_a_method_that_sets_the_mode_sets_it_every_time() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        found = []
        for _ in range(3):
            net.train()
            found += [net.test(x, edges), net.one.training, net.training]
        return found

    same(script)


@pytest.mark.parametrize("method", ["fit", "fit_by_hand"])
def test_a_method_that_trains_the_model_runs_operator_by_operator_and_explain_says_so(method: str) -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        losses = [getattr(net, method)(x, edges, optimizer) for _ in range(3)]
        if isinstance(net, DistributedModule):
            assert f"{method} runs operator by operator: " in net.explain()
        return [*losses, *(p.detach() for p in net.parameters())]

    same(script)


def test_what_can_not_be_distributed_is_refused_at_the_methods_line() -> None:
    with pytest.raises(PassError, match=r"(?s)ordered.*sort.*test_methods\.py:\d+|test_methods\.py:\d+.*ordered.*sort"):
        on_ranks(lambda net, x, edges: [net.ordered(x, edges)])


def test_what_was_refused_is_tried_anew() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        kept = net.encode
        with pytest.raises(
            CaptureError, match="the method encode is no program: the arguments come from different calls"
        ):
            net.encode(net.shard(*data())[0], edges)
        assert not net._methods.refused
        z = kept(x, edges)
        captured(net, "encode")
        return [z.detach()]

    on_ranks(script)


def test_what_is_no_method_that_returns_is_as_it_was() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        rounds = [*net.rounds(x, edges)]
        later = asyncio.run(net.later(x, edges)).detach()
        if isinstance(net, DistributedModule):
            assert not net._methods.refused
            assert list(inspect.signature(net.encode).parameters) == ["x", "edges"]
        return [net.width, *rounds, later]

    same(script)


def test_a_copy_of_the_model_has_programs_and_weights_of_its_own() -> None:
    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        first = net.encode(x, edges).detach()
        other = copy.deepcopy(net)
        with torch.no_grad():
            other.one.weight.mul_(2)
        return [first, other.encode(x, edges).detach(), net.encode(x, edges).detach(), *net.state_dict()]

    same(script)


@pytest.mark.pyg
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("variational", [False, True])
def test_auto_encoders_of_pyg(variational: bool, parts: int) -> None:
    geometric = pytest.importorskip("torch_geometric.nn")

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = geometric.GCNConv(4, 16)
            self.heads = nn.ModuleList(geometric.GCNConv(16, 8) for _ in range(1 + variational))

        def forward(self, x: Tensor, edges: Tensor) -> Any:
            h = self.first(x, edges).relu()
            found = tuple(head(h, edges) for head in self.heads)
            return found if variational else found[0]

    torch.manual_seed(0)
    model = (geometric.VGAE if variational else geometric.GAE)(Encoder()).double()
    if variational:
        model.eval()  # in training it draws noise, of which one device has other numbers

    def script(net: Any, x: Any, edges: Any) -> list[Any]:
        for _ in range(2):
            net.zero_grad()
            z = net.encode(x, edges)
            loss = net.recon_loss(z, edges, edges.flip(0))
            if variational:
                loss = loss + net.kl_loss() / NODES
            loss.backward()
        captured(net, "encode", "recon_loss")
        return [z.detach(), loss.detach(), *gradients(net)]

    same(script, model, parts)


@pytest.mark.dgl
@pytest.mark.parametrize("parts", [2, 4])
def test_an_auto_encoder_of_dgl(parts: int) -> None:
    import sylvie_fx.dgl  # noqa: F401

    dgl = pytest.importorskip("dgl")
    from dgl.nn import SAGEConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = SAGEConv(4, 16, "mean"), SAGEConv(16, 8, "mean")

        def encode(self, graph: Any, x: Tensor) -> Tensor:
            return self.two(graph, self.one(graph, x).relu())  # type: ignore[no-any-return]

        def decode(self, graph: Any, z: Tensor) -> Tensor:
            with graph.local_scope():
                graph.ndata["z"] = z
                graph.apply_edges(dgl.function.u_dot_v("z", "z", "score"))
                return graph.edata["score"]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, cache = Net().double(), ProgramCache()
    x, edges = data()
    graph = dgl.graph((edges[0], edges[1]), num_nodes=NODES)

    def script(net: Any, graph: Any, x: Any) -> list[Any]:
        z = net.encode(graph, x)
        loss = F.softplus(-net.decode(graph, z)).mean()
        loss.backward()
        captured(net, "encode", "decode")
        return [loss.detach(), *gradients(net)]

    def rank(transport: Any) -> Any:
        net = DistributedModule(copy.deepcopy(model), Options(timeout=30), default_passes(), transport, cache)
        return script(net, *net.shard(graph, x, partition="random"))

    found = run_ranks(parts, rank, 30)
    for one in found:
        torch.testing.assert_close(one, script(copy.deepcopy(model), graph, x), rtol=1e-10, atol=1e-12)
