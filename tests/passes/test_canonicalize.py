from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pass_support import Layer, after, changes, check_parity, targets
from torch import Tensor, nn

from sylvie_fx.ir.errors import PassError
from sylvie_fx.passes.canonicalize import Canonicalize


def scatter_add(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return torch.zeros_like(h).scatter_add(0, e[1].view(-1, 1).expand_as(h[e[0]]), h[e[0]])


def all_reads(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    wide = e[0].view(-1, 1).expand(-1, 4)
    read = (
        h[e[0]]
        + h.index_select(0, e[0])
        + h.gather(0, wide)
        + F.embedding(e[0], h)
        + torch.take(h[:, 0], e[0])[:, None]
    )
    return torch.zeros_like(h).index_add(0, e[1], read)


def all_writes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h, wide = m.a(x), e[1].view(-1, 1).expand(-1, 4)
    messages, zeros = h[e[0]], torch.zeros_like(h)
    out = zeros.index_add(0, e[1], messages, alpha=2) + zeros.scatter_add(0, wide, messages)
    out = out + zeros.index_put((e[1],), messages, accumulate=True) + h.scatter_reduce(0, wide, messages, "amax")
    out = (
        out + h.scatter_reduce(0, wide, messages, "amin") + torch.ones_like(h).scatter_reduce(0, wide, messages, "prod")
    )
    return out + zeros.scatter_reduce(0, wide, messages, "mean", include_self=False)


def overwritten(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    out = h.index_put((e[1],), h[e[0]])  # where the index repeats, the last write wins
    return out.index_copy(0, e[0][::2], h[e[1][::2]]).index_fill(0, e[1][::9], 0.5)


def by_mask(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    even = torch.arange(x.size(0)) % 2 == 0
    h = m.a(x)
    h[even] = m.table[0]
    h[~even] = m.a(x[even.logical_not()]) * 2
    return h


def entries(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return h[torch.arange(x.size(0)), torch.arange(x.size(0)) % 4] + h[e[0], e[1] % 4].mean()


def by_position(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return h[1:] - h[:-1] + h.flip(0)[1:]


def dropout(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return F.dropout(m.b(F.dropout(m.a(x), 0.2)), 0.5)


def pure(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x).relu())


def test_a_scatter_with_a_broadcast_index(golden) -> None:
    golden(after(scatter_add, "canonicalize"))


def test_dropouts_know_their_call_site(golden) -> None:
    golden(after(dropout, "canonicalize"))


@pytest.mark.parametrize("function", [all_reads, all_writes, overwritten, by_mask, entries, by_position])
def test_no_other_spelling_is_left(function) -> None:
    known = {"sylvie.gather", "sylvie.scatter"}
    left = [
        t
        for t in targets(after(function, "canonicalize"))
        if t.startswith(("aten.scatter", "aten.index_add", "aten.index_put"))
    ]
    assert left == []
    assert known & set(targets(after(function, "canonicalize")))


def test_a_program_without_reads_of_rows_stays() -> None:
    assert not changes(Canonicalize(), after(pure, "canonicalize", before=True))


@pytest.mark.parametrize("function", [all_reads, all_writes, overwritten, dropout])
def test_a_second_run_changes_nothing(function) -> None:
    assert not changes(Canonicalize(), after(function, "canonicalize"))


@pytest.mark.parametrize(
    "function", [scatter_add, all_reads, all_writes, overwritten, by_mask, entries, by_position, dropout]
)
def test_parity(function) -> None:
    check_parity(function)


def picked(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x)[m.a(x).argmax(1)]


def masked(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x)[m.a(x).sum(1) > 0]


def written(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return torch.zeros_like(h).index_add(0, h.argmax(1), h)


def channels(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return nn.functional.dropout1d(m.a(x).unsqueeze(0), 0.5, True)


@pytest.mark.parametrize(("function", "text"), [
    (picked, "picked by an index that depends on features"), (masked, "picked by a mask that depends on features"),
    (written, "written by an index that depends on features"), (channels, "drops whole channels"),
])  # fmt: skip
def test_refusals_name_the_line(function, text: str) -> None:
    with pytest.raises(PassError, match=rf"test_canonicalize.py:\d+: .*{text}"):
        after(function, "canonicalize")
