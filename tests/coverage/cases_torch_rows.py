"""More ways to write graph layers in plain PyTorch: what is done with rows, readouts, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from cases_torch import Layer, case, ids_of_nodes, labels_of_nodes, mask_of_nodes, spread
from torch import Tensor


@case(mask_of_nodes)
def rows_by_mask(m: Layer, x: Tensor, e: Tensor, mask: Tensor) -> Tensor:
    return m.b(spread(m.a(x), e))[mask]


@case(mask_of_nodes, labels_of_nodes)
def loss_inside(m: Layer, x: Tensor, e: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.b(spread(m.a(x), e))[mask], y[mask])


@case(labels_of_nodes)
def picked_entries(m: Layer, x: Tensor, e: Tensor, y: Tensor) -> Tensor:
    out = F.log_softmax(m.b(spread(m.a(x), e)), dim=-1)
    return -out[torch.arange(x.size(0)), y].mean()


@case(mask_of_nodes)
def rows_written_by_mask(m: Layer, x: Tensor, e: Tensor, mask: Tensor) -> Tensor:
    h = m.a(x).clone()
    h[mask] = m.vector
    h[~mask] += 1.0
    return m.b(spread(h, e))


@case(mask_of_nodes)
def rows_computed_by_mask(m: Layer, x: Tensor, e: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[mask] = m.a(x[mask])
    return m.b(spread(out, e))


@case(mask_of_nodes, labels_of_nodes)
def label_propagation(m: Layer, x: Tensor, e: Tensor, mask: Tensor, y: Tensor) -> Tensor:
    label = torch.zeros(x.size(0), 4)
    label[mask] = F.one_hot(y[mask], 4).to(x.dtype)
    for _ in range(3):
        label = 0.5 * torch.zeros_like(label).index_add(0, e[1], label[e[0]]).clamp(0, 1) + 0.5 * label
    return m.b(x) + label


@case()
def columns_in_place(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x).clone()
    h[:, 0] = 1.0
    h[:, 1:3] *= 2
    h[..., -1].add_(h[:, 2])
    return m.b(spread(h.relu_(), e))


@case(refusal="is changed in place")
def input_in_place(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    x += 1
    return m.b(spread(x, e))


@case()
def means_over_nodes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = spread(m.a(x), e)
    return m.b((h - h.mean(0)) / (h.std(0) + 1e-5) + h.var(0, keepdim=True) + h.norm(dim=0) + h.amax(0))


@case()
def standardised_by_hand(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    variance, mean = torch.var_mean(h, dim=0, correction=0)
    return m.b(spread((h - mean) * torch.rsqrt(variance + 1e-5), e))


@case()
def normalised_over_nodes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(F.normalize(m.a(x), dim=0) + F.normalize(spread(x, e), dim=1))


@case()
def size_as_a_number(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.sum(0) / x.size(0) + h * math.sqrt(8) / e.size(1) + torch.log(torch.tensor(float(x.size(0)))))


@case()
def attention_over_all_nodes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = spread(m.a(x), e)
    weight = torch.softmax(h @ m.vector, dim=0)
    return m.b((weight[:, None] * h).sum(0))


@case()
def virtual_node(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    for _ in range(2):
        hub = torch.tanh(h.mean(0, keepdim=True) @ m.a.weight)
        h = spread(h, e).relu() + hub
    return m.b(h)


@case()
def gram_matrix(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h @ (h.t() @ h) / x.size(0))


@case()
def linear_attention(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    q, k = F.elu(m.a(x)).view(-1, 2, 4) + 1, F.elu(x).view(-1, 2, 4) + 1
    state = torch.einsum("nhd,nhe->hde", k, x.view(-1, 2, 4))
    total = torch.einsum("nhd,hd->nh", q, k.sum(0))
    return m.b((torch.einsum("nhd,hde->nhe", q, state) / total[..., None]).reshape(-1, 8))


@case()
def soft_clusters(m: Layer, x: Tensor, e: Tensor) -> Any:
    s = torch.softmax(m.b(x), dim=-1)
    pooled = s.t() @ x
    coarse = s.t() @ torch.zeros_like(s).index_add(0, e[1], s[e[0]])
    balance = torch.norm(s.sum(0)) / x.size(0)
    return m.a(pooled), torch.trace(coarse) + balance


@case()
def heads_and_views(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x).view(-1, 2, 4).transpose(0, 1)
    gathered = h[:, e[0]].permute(1, 0, 2).reshape(e.size(1), 8)
    return m.b(torch.zeros_like(x).index_add(0, e[1], gathered))


@case()
def unflatten_stack_split(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = torch.stack([m.a(x), spread(x, e)], dim=1)
    left, right = h.unflatten(-1, (2, 4)).chunk(2, dim=2)
    return m.b(torch.cat([left.flatten(1), right.flatten(1)], -1)[:, :8])


@case()
def recurrent_cell(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    for _ in range(2):
        h = m.cell(spread(h, e), h)
    return m.b(h)


@case()
def attention_inside_a_node(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    tokens = torch.stack([x, m.a(x), spread(x, e)], dim=1)
    return m.b(m.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


@case()
def jumping_knowledge_by_lstm(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    layers = torch.stack([x, m.a(x), spread(x, e)], dim=1)
    return m.b(m.lstm(layers)[0][:, -1])


@case()
def jumping_knowledge_by_max(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(torch.stack([x, m.a(x), spread(x, e)], dim=-1).max(dim=-1)[0])


@case(steps=2)
def batch_norm_and_dropout(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(F.dropout(m.norm(spread(m.a(x), e)).relu(), 0.4, m.training))


@case()
def batch_norm_over_edges(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    edge = m.norm(m.a(x)[e[0]] - x[e[1]]).relu()
    return m.b(torch.zeros_like(x).index_add(0, e[1], edge))


@case(refusal="draws random numbers")
def alpha_dropout(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(F.alpha_dropout(m.a(x), 0.2, True))


@case(refusal="draws random numbers")
def noise_on_features(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x) + torch.randn_like(x))


@case(refusal="draws random numbers")
def dropped_edges(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(spread(m.a(x), e[:, torch.rand(e.size(1)) > 0.3]))


@case(refusal="draws random numbers")
def shuffled_nodes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x) - x[torch.randperm(x.size(0))])


@case(ids_of_nodes)
def embedding_of_nodes(m: Layer, x: Tensor, e: Tensor, ids: Tensor) -> Tensor:
    return m.b(spread(m.a(x) + F.embedding(ids % 3, m.table), e))


@case()
def embedding_bag(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    kind = torch.stack([torch.arange(x.size(0)) % 7, torch.arange(x.size(0)) % 5], 1)
    return m.b(m.a(x) + m.bag(kind))


@case()
def checkpointed(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = torch.utils.checkpoint.checkpoint(lambda v: spread(m.a(v), e).relu(), x, use_reentrant=False)
    return m.b(h)


@case()
def mean_squared_difference_over_edges(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return (h[e[0]] - h[e[1]]).pow(2).sum(-1).mean() + F.mse_loss(h, x)


@case()
def scores_of_edges(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = spread(m.a(x), e)
    return (h[e[0]] * h[e[1]]).sum(-1)


@case()
def cosine_of_neighbours(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    weight = F.cosine_similarity(h[e[0]], h[e[1]], dim=-1).clamp(min=0.1)
    return m.b(torch.zeros_like(h).index_add(0, e[1], weight.unsqueeze(1) * h[e[0]]))


@case()
def complex_numbers(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    z = torch.complex(m.a(x), x)
    w = z[e[0]] * z[e[1]].conj()
    return m.b(torch.zeros_like(x).index_add(0, e[1], w.real) + w.imag.mean())


@case()
def several_outputs(m: Layer, x: Tensor, e: Tensor) -> Any:
    h = spread(m.a(x), e)
    return {"nodes": m.b(h), "graph": h.mean(0), "both": (h[e[0]], h.sum())}


@case()
def unused_neighbours(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x).relu())


@case()
def accuracy_inside(m: Layer, x: Tensor, e: Tensor) -> Any:
    out = m.b(spread(m.a(x), e))
    return out, (out.argmax(-1) == 0).float().mean()


@case(refusal="sorts over all rows")
def sort_pool(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(torch.sort(m.a(x), dim=0)[0])


@case(refusal="an index that depends on features")
def top_k_pool(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    score = m.a(x).sum(-1)
    return m.b(x[score.topk(10)[1]])


@case(refusal="depends on values computed from features")
def branch_on_features(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h if h.mean() > 0 else -h)


@case(refusal="dense")
def all_pairs(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.softmax(h @ h.t(), dim=-1) @ h)


@case(refusal="all rows to all rows")
def distances_of_all_pairs(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(torch.cdist(m.a(x), x).sum(1, keepdim=True).expand(-1, 8))


@case(refusal="the reshape mixes rows")
def reshape_of_nodes(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.a(x).reshape(8, -1).sum(1)


@case(refusal="by its position")
def first_node(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(spread(m.a(x), e) + m.a(x)[0])


@case(refusal="depends on features")
def neighbours_by_features(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h[h.argmax(-1)])


@case(refusal="feature dropout")
def feature_dropout(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(F.dropout1d(m.a(x).unsqueeze(0), 0.3, True).squeeze(0))


@case(refusal="number depends on values computed from features")
def item_of_features(m: Layer, x: Tensor, e: Tensor) -> Tensor:
    return m.b(m.a(x) * float(x.mean()))
