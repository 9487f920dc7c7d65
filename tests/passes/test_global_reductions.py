from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pass_support import Layer, after, changes, check_parity
from torch import Tensor

from sylvie_fx.ir.errors import PassError
from sylvie_fx.passes.global_reductions import GlobalReductions


def mean(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x).mean(0)


def row_wise(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x).softmax(1).sum(1)


def moments(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    variance, centre = torch.var_mean(h, 0, correction=0)
    deviation, _ = torch.std_mean(h, dim=(0,), keepdim=True)
    return h.std(0) + h.var(0, unbiased=False) + variance + centre + deviation[0] + h.std() + h.var()


def norms(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    powers = h.norm(dim=0) + h.norm(p=3, dim=0) + torch.linalg.vector_norm(h, dim=0, ord=torch.inf)
    return powers + h.norm() + torch.linalg.norm(h, dim=0) + F.normalize(h, dim=0).sum(0)


def extremes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x).round(decimals=0) * 0.5 + m.a(x)  # with ties
    return h.amax(0) + h.amin(0) + h.max(0)[0] + h.min(dim=0).values + h.max() - h.min() + torch.logsumexp(h, 0)


def over_nodes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return h.softmax(0) + F.log_softmax(h, dim=0) + (h.softmax(0).t() @ h).sum() + torch.einsum("nd,ne->de", h, h).sum()


def truth(m: Layer, x: Tensor, e: Tensor) -> tuple[Tensor, ...]:
    h = m.a(x)
    flags = h > 0
    return h, flags.any(0), flags.all(0), flags.sum(), torch.count_nonzero(flags, 0), (h.argmax(1) == 0).double().mean()


def losses(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h, y = m.a(x), torch.arange(x.size(0)) % 4
    kept = torch.where(y == 3, -100, y)
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=x.dtype)
    total = F.cross_entropy(h, kept) + F.cross_entropy(h, y, weight=weight, label_smoothing=0.0)
    total = total + F.nll_loss(h.log_softmax(1), y, reduction="sum") + F.mse_loss(h, x[:, :4])
    total = total + F.binary_cross_entropy_with_logits(h, (x[:, :4] > 0).double()) + F.smooth_l1_loss(h, x[:, 4:8])
    return total + F.cross_entropy(h, h.detach().softmax(1)) + F.l1_loss(h, x[:, :4], reduction="none").mean()


def tables(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h, kind = m.a(x), torch.arange(x.size(0)) % 5
    wide = kind.view(-1, 1).expand(-1, 4)
    zeros = torch.zeros(7, 4, dtype=x.dtype)  # two rows stay empty
    out = zeros.index_add(0, kind, h)
    for reduce in ("mean", "amax", "amin"):
        out = out + zeros.scatter_reduce(0, wide, h, reduce, include_self=False)
    return h + out[kind]


def batch_norms(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    plain = F.batch_norm(h, None, None, training=True)
    return (
        plain
        + F.instance_norm(h.t().unsqueeze(0)).squeeze(0).t()
        + F.batch_norm(h[e[0]], None, None, training=True).sum(0)
    )


def test_a_mean_is_a_sum_an_all_reduce_and_a_division(golden) -> None:
    golden(after(mean, "global-reductions"))


def test_row_wise_reductions_stay() -> None:
    assert not changes(GlobalReductions(), after(row_wise, "infer-placement"))


EVERY = [mean, row_wise, moments, norms, extremes, over_nodes, truth, losses, tables, batch_norms]


@pytest.mark.parametrize("function", EVERY)
def test_a_second_run_changes_nothing(function) -> None:
    assert not changes(GlobalReductions(), after(function, "global-reductions"))


@pytest.mark.parametrize("function", EVERY)
def test_parity(function) -> None:
    check_parity(function)


def test_an_average_of_weighted_classes_counts_weights() -> None:
    def weighted(m: Layer, x: Tensor, e: Tensor) -> Tensor:
        y = torch.arange(x.size(0)) % 4
        weight = torch.tensor([0.1, 5.0, 1.0, 3.0], dtype=x.dtype)
        return F.cross_entropy(m.a(x), y, weight=weight, label_smoothing=0.1, ignore_index=2)

    check_parity(weighted)


@pytest.mark.parametrize(("function", "text"), [
    (lambda m, x, e: m.a(x).prod(0), "no exact form of it over ranks"),
    (lambda m, x, e: m.a(x)[m.a(x).argmax(0)], "depends on features"),
    (lambda m, x, e: m.a(x).argmax(0), "which row of the whole graph"),
])  # fmt: skip
def test_refusals(function, text: str) -> None:
    with pytest.raises(PassError, match=text):
        after(function, "global-reductions")


def _zero_columns(m: Layer, x: Tensor) -> Tensor:
    return m.a(x) * torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("function", [
    lambda m, x, e: m.a(x) + _zero_columns(m, x).std(0),
    lambda m, x, e: m.a(x) + _zero_columns(m, x).norm(dim=0),
    lambda m, x, e: torch.nn.functional.normalize(_zero_columns(m, x), dim=0),
    lambda m, x, e: m.a(x) + (0.0 * m.a(x)).norm(),
], ids=["deviation", "norms", "normalized", "norm of all"])  # fmt: skip
def test_the_gradient_of_the_norm_of_zeros_is_zero(function: Callable[..., Tensor]) -> None:
    check_parity(function)


@pytest.mark.parametrize("function", [
    lambda m, x, e: m.a(x) * torch.linalg.vector_norm(m.a(x), 0),
    lambda m, x, e: m.a(x) * torch.linalg.norm(m.a(x)) + torch.linalg.matrix_norm(m.a(x)),
    lambda m, x, e: m.a(x) * torch.dist(m.a(x), m.a(x) * 2),
    lambda m, x, e: m.a(x) @ torch.cov(m.a(x).t()) + m.a(x) @ torch.corrcoef(m.a(x).t()),
    lambda m, x, e: torch.softmax(-torch.cdist(m.a(x), m.table), dim=1),
    lambda m, x, e: torch.softmax(-torch.cdist(m.table, m.a(x)), dim=0).t(),
], ids=["ord 0", "of all", "dist", "covariance", "to a table", "from a table"])  # fmt: skip
def test_norms_and_distances(function: Callable[..., Tensor]) -> None:
    check_parity(function)
