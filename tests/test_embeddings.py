"""Options of nn.Embedding: what they do to the gradient holds over ranks, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sylvie_fx

NODES, WIDTH, CLASSES = 29, 4, 7


class Model(nn.Module):
    """A table that is read, and one aggregation of what was read."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(rows, WIDTH, **options), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, edge_index: Tensor) -> Tensor:
        h = self.lin(self.table(ids))
        return h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]].tanh())


@pytest.fixture
def data() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "edges": torch.randint(0, NODES, (2, 90)),
        "nodes": torch.arange(NODES),
        "some": torch.randint(0, NODES, (NODES,)),
        "classes": torch.randint(0, CLASSES, (NODES,)),
    }


def verified(rows: int, ids: Tensor, edges: Tensor, **options: Any) -> Any:
    model = Model(rows, **options).double()
    return sylvie_fx.verify(model, ids, edges, parts=3, partition="random", timeout=60)


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"padding_idx": -2}, {"sparse": True}], ids=str)
@pytest.mark.parametrize(("rows", "ids"), [(NODES, "nodes"), (NODES, "some"), (CLASSES, "classes")])
def test_gradients_are_those_of_one_device(
    data: dict[str, Tensor], rows: int, ids: str, options: dict[str, Any]
) -> None:
    report = verified(rows, data[ids], data["edges"], **options)
    assert report.refused is None
    assert report.exact, str(report)
    assert "gradient table.weight" in report.per_tensor


@pytest.mark.parametrize(("rows", "ids"), [(NODES, "some"), (CLASSES, "classes")])
def test_a_gradient_divided_by_counts_is_refused(data: dict[str, Tensor], rows: int, ids: str) -> None:
    report = verified(rows, data[ids], data["edges"], scale_grad_by_freq=True)
    assert "test_embeddings.py:" in str(report.refused)
    assert "scale_grad_by_freq=True" in str(report.refused)
    assert "register_hook" in str(report.refused)


def test_the_remedy_gives_the_gradient_divided_by_counts(data: dict[str, Tensor]) -> None:
    ids, edges = data["classes"], data["edges"]

    def gradient(model: Any, ids: Tensor, edges: Tensor) -> Tensor:
        model(ids, edges).pow(2).mean().backward()
        return model.table.weight.grad

    torch.manual_seed(1)
    expected = gradient(Model(CLASSES, scale_grad_by_freq=True), ids, edges)
    torch.manual_seed(1)
    model = Model(CLASSES)
    counts = torch.bincount(ids, minlength=CLASSES).clamp(min=1)
    model.table.weight.register_hook(lambda g: g / counts[:, None])
    distributed = sylvie_fx.distribute(model)
    torch.testing.assert_close(gradient(distributed, *distributed.shard(ids, edges)), expected)
