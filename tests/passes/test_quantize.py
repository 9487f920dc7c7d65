from __future__ import annotations

import copy

import pytest
import torch
from exchange_models import BothWays, Stack, Sum, compiled, graph

import sylvie_fx
from sylvie_fx.engine import ProgramCache
from sylvie_fx.ir.coding import EXACT, Coding, ExchangeCoding
from sylvie_fx.ir.errors import OptionError
from sylvie_fx.ir.options import Options, widened
from sylvie_fx.kernels.wire import CodecSpec
from sylvie_fx.passes.base import PassContext
from sylvie_fx.passes.quantize import Quantize
from sylvie_fx.runtime.in_process import run_ranks
from sylvie_fx.runtime.transport import Transport


def codings(net: sylvie_fx.DistributedModule, mode: str = "train") -> list[str]:
    return [str(c) for c in net.program(mode).codings.values()]


def test_bits_and_variant_come_from_the_options() -> None:
    model = Stack(Sum(2048, 8), Sum(8, 4))
    assert codings(compiled(model, *graph(2048))) == ["exact", "exact"]
    one = {"forward": 1, "backward": 1}
    assert codings(compiled(model, *graph(2048), bits=one)) == ["1-bit dithered shift"] * 2
    assert (
        codings(compiled(model, *graph(2048), bits=one, variant="plain", gradients="plain"))
        == ["1-bit stochastic plain"] * 2
    )
    wide = Stack(Sum(2048, 80), Sum(80, 48), Sum(48, 40))
    rotated = codings(compiled(wide, *graph(2048), bits=1))
    assert rotated == ["1-bit dithered shift", "1-bit rotated shift", "1-bit rotated shift"], "80 take 20 bytes for 14"
    assert (
        codings(compiled(model, *graph(2048), bits={"forward": 2, "backward": 8}))
        == ["2-bit dithered shift / 8-bit dithered shift"] * 2
    )
    by_module = compiled(model, *graph(2048), bits={"layers.1": 4, "": 32})
    assert codings(by_module) == ["exact", "4-bit dithered shift"]


def test_narrow_rows_take_the_bits_that_their_header_leaves_free() -> None:
    model = Stack(Sum(2048, 64), Sum(64, 7))
    found = codings(compiled(model, *graph(2048), bits=1))
    assert found == ["1-bit rotated shift", "4-bit dithered shift"]
    assert [widened(1, columns) for columns in (1, 4, 5, 8, 9, 16, 17)] == [8, 8, 4, 4, 2, 2, 1]
    assert [widened(bits, 2) for bits in (2, 8, 16, 32)] == [8, 8, 16, 32]


def test_eval_exchanges_exactly_unless_told_otherwise() -> None:
    model = Stack(Sum(2048, 8), Sum(8, 4)).eval()
    assert codings(compiled(model, *graph(2048), bits=1), "eval") == ["exact", "exact"]
    assert codings(compiled(model, *graph(2048), bits=1, eval_bits=8), "eval") == ["8-bit dithered shift"] * 2


def test_partial_sums_are_coded_plain() -> None:
    net = compiled(Stack(Sum(2048, 8), BothWays(8, 4)), *graph(2048), bits={"forward": 1, "backward": 1})
    assert codings(net)[-1] == "1-bit stochastic plain / 1-bit dithered shift"


def test_a_second_run_changes_nothing() -> None:
    program = compiled(Stack(Sum(2048, 8), Sum(8, 4)), *graph(2048), bits=1).program("train")
    before = str(program)
    assert str(Quantize().run(program, PassContext(Options(bits=8)))) == before


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("columns", [1, 7, 16, 256])
def test_the_cost_model_counts_what_the_codec_sends(bits: int, columns: int) -> None:
    assert Coding(bits).row_bytes(columns) == CodecSpec(bits).row_bytes(columns)


@pytest.mark.parametrize("bits", [0, 3, 64, True, "1", {"forward": 3}, {"conv": 5}])
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(OptionError, match="bits"):
        Options(bits=bits)


def test_the_longest_module_path_counts() -> None:
    options = Options(bits={"": 8, "conv": 2, "conv.inner": 1}, variant="plain")
    assert options.coding("train", "conv.inner.lin", 64).forward.bits == 1
    assert options.coding("train", "conv.other", 64).forward.bits == 2
    assert options.coding("train", "convolution", 64).forward.bits == 8
    assert options.coding("eval", "conv", 64) == ExchangeCoding(EXACT, EXACT)


def test_one_bit_training_learns_as_exact_training_does() -> None:
    torch.manual_seed(0)
    model = Stack(Sum(12, 16), Sum(16, 4))
    x, edges = graph()
    target = torch.randint(4, (len(x),), generator=torch.Generator().manual_seed(1))

    def losses(bits: int) -> tuple[float, float]:
        cache = ProgramCache()

        def run(transport: Transport) -> tuple[float, float]:
            own = copy.deepcopy(model)
            net = sylvie_fx.DistributedModule(own, Options(bits=bits), sylvie_fx.default_passes(), transport, cache)
            data = net.shard(x, edges, target, partition="random")
            optimizer = torch.optim.Adam(net.parameters(), 0.01)
            found = []
            for _ in range(120):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(*data[:2]), data[2])
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            return found[0], found[-1]

        return run_ranks(3, run, 60.0)[0]

    (start, exact), (_, coded) = losses(32), losses(1)
    # A learning curve within a quarter of the exact one's descent.
    assert start - coded > 0.75 * (start - exact)
