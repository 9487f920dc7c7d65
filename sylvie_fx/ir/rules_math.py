"""Placement rules of products, reductions, normalisations, convolutions and losses."""

from __future__ import annotations

import torch

from sylvie_fx.ir.placement import REPLICATED, Rows
from sylvie_fx.ir.rules import Call, Outcome, Refused, is_replicated, placement_rule, pointwise, same_rows, wrap

aten = torch.ops.aten

_DENSE = Refused(
    "it is a dense product of all rows with all rows",
    "restrict it to the pairs that are edges of the graph; a dense rows-by-rows result does not fit the promise of 1/k memory",
)


@placement_rule(aten.linear)
def linear(call: Call) -> Outcome:
    """``x @ W.T + b``: rows of x pass; the weight is replicated."""
    x, weight = call.place(call.arg(0)), call.place(call.arg(1))
    if isinstance(weight, Rows):
        if isinstance(x, Rows):
            raise _DENSE
        raise Refused(
            "a weight with one row per node multiplies a replicated tensor", "swap the operands of the product"
        )
    if isinstance(x, Rows) and x.dim == len(call.shape(call.arg(0))) - 1:
        raise Refused("the product sums over the rows of the graph", "write it as a matrix product x.t() @ y")
    return Outcome(x)


@placement_rule(aten.mm, aten.matmul, aten.bmm, aten.mv, aten.dot, aten.vdot)
def matmul(call: Call) -> Outcome:
    """Matrix products: rows as a batch or outer dimension pass; contracted rows give a sum over ranks."""
    return _product(call, 0, 1)


@placement_rule(aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm)
def addmm(call: Call) -> Outcome:
    """``bias + a @ b``."""
    outcome = _product(call, 1, 2)
    if outcome.crosses:
        raise Refused("a bias is added to a product that sums over all rows", "write the sum as an addition of its own")
    if isinstance(call.place(call.arg(0)), Rows) and is_replicated(outcome.out):  # type: ignore[arg-type]
        raise Refused("a bias with one row per node is added to a replicated product", "add it to rows")
    return outcome


def _product(call: Call, left: int, right: int) -> Outcome:
    a, b = call.arg(left), call.arg(right)
    pa, pb = call.place(a), call.place(b)
    ra, rb = len(call.shape(a)), len(call.shape(b))
    out_rank = len(call.out_shape)
    if not isinstance(pa, Rows) and not isinstance(pb, Rows):
        return Outcome(REPLICATED)
    contract_a = isinstance(pa, Rows) and pa.dim == ra - 1
    contract_b = isinstance(pb, Rows) and pb.dim == (rb - 2 if rb > 1 else 0)
    if contract_a or contract_b:
        if not (contract_a and contract_b):
            raise Refused(
                "it contracts rows of the graph with a replicated tensor of the same length", "make both of them rows"
            )
        assert isinstance(pa, Rows)
        assert isinstance(pb, Rows)
        same_rows([pa, pb])
        return Outcome(REPLICATED, crosses=True)
    dims = []
    if isinstance(pa, Rows):
        outer = pa.dim == ra - 2
        # The outer dimension of the left factor is the last but one of the result, or the last where b is a vector.
        dims.append(
            Rows(pa.space, (out_rank - (2 if rb > 1 else 1)) if outer else pa.dim + out_rank - max(ra, 2), pa.factor)
        )
    if isinstance(pb, Rows):
        outer = rb > 1 and pb.dim == rb - 1
        dims.append(Rows(pb.space, out_rank - 1 if outer else pb.dim + out_rank - max(rb, 2), pb.factor))
    same_rows(dims)
    if len({d.dim for d in dims}) > 1:
        raise _DENSE
    return Outcome(dims[0])


@placement_rule(aten.einsum)
def einsum(call: Call) -> Outcome:
    """Rows keep their letter; a letter of rows that is summed over gives a sum over ranks."""
    equation, tensors = str(call.arg(0)), list(call.arg(1))
    if not call.sharded():
        return Outcome(REPLICATED)
    terms, out = einsum_letters(equation, [len(call.shape(t)) for t in tensors])
    rows: dict[str, Rows] = {}
    for tensor, letters in zip(tensors, terms, strict=True):
        place = call.place(tensor)
        if isinstance(place, Rows):
            letter = letters[place.dim]
            same_rows([place, rows.setdefault(letter, place)])
    if len(rows) > 1:
        raise _DENSE
    ((letter, place),) = rows.items()
    for tensor, letters in zip(tensors, terms, strict=True):
        if letter in letters and not isinstance(call.place(tensor), Rows):
            raise Refused(
                "it multiplies rows of the graph with a replicated tensor of the same length", "make both of them rows"
            )
    if letter in out:
        return Outcome(Rows(place.space, out.index(letter), place.factor))
    return Outcome(REPLICATED, crosses=True)


def einsum_letters(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, an ellipsis written out in digits."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms, widest = left.split(","), 0
    extra = "01234567"
    full = []
    for term, rank in zip(terms, ranks, strict=True):
        hidden = rank - len(term.replace("...", "")) if "..." in term else 0
        widest = max(widest, hidden)
        full.append(term.replace("...", extra[len(extra) - hidden :] if hidden else ""))
    if not arrow:
        joined = "".join(full)
        right = ("..." if "..." in left else "") + "".join(
            sorted(c for c in set(joined) if c not in extra and joined.count(c) == 1)
        )
    return full, right.replace("...", extra[len(extra) - widest :] if widest else "")


@placement_rule(
    aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.var, aten.std, aten.logsumexp, aten.norm, aten.any,
    aten.all, aten.max, aten.min, aten.argmax, aten.argmin, aten.linalg_vector_norm, aten.nansum, aten.count_nonzero,
    aten.var_mean, aten.std_mean, aten.nanmean, aten.frobenius_norm, aten.median.default,
)  # fmt: skip
def reduction(call: Call) -> Outcome:
    """Reductions over given dimensions: row-local, or over all ranks if the row dimension is among them."""
    if call.op in (aten.max.other, aten.min.other):
        return pointwise(call)
    source = call.arg(0)
    place = call.place(source)
    if not isinstance(place, Rows):
        return call.spread(REPLICATED)
    rank = len(call.shape(source))
    dims, keepdim = reduced_dims(call, rank), reduction_keeps(call)
    if place.dim in dims:
        if call.op.overloadpacket in (aten.argmax, aten.argmin, aten.median) or call.op in (aten.max.dim, aten.min.dim):
            if call.op.overloadpacket in (aten.max, aten.min) and _only_values(call):
                return call.spread(REPLICATED, crosses=True)
            raise Refused("it asks which row of the whole graph is the largest", "use amax/amin for the value alone")
        return call.spread(REPLICATED, crosses=True)
    dim = place.dim if keepdim else place.dim - sum(d < place.dim for d in dims)
    return call.spread(Rows(place.space, dim, place.factor))


def _only_values(call: Call) -> bool:
    return all(len(user.args) == 2 and user.args[1] == 0 for user in call.node.users)


def reduced_dims(call: Call, rank: int) -> list[int]:
    """The dimensions that a reduction sums over, counted from the front; all of them where none is named."""
    for argument in call.op._schema.arguments:
        if argument.name == "dim":
            value = call.named("dim")
            if value is None or value == []:
                return list(range(rank))
            return [wrap(d, rank) for d in (value if isinstance(value, (list, tuple)) else [value])]
    return list(range(rank))


def reduction_keeps(call: Call) -> bool:
    """Whether a reduction keeps the dimensions it sums over."""
    return any(a.name == "keepdim" for a in call.op._schema.arguments) and bool(call.named("keepdim"))


@placement_rule(aten.layer_norm, aten.native_layer_norm, aten.rms_norm)
def layer_norm(call: Call) -> Outcome:
    """Normalisation of trailing dimensions."""
    source = call.arg(0)
    place = call.place(source)
    if isinstance(place, Rows) and place.dim >= len(call.shape(source)) - len(call.arg(1)):
        raise Refused(
            "it normalises over the rows of the graph together with others", "normalise with mean and var over dim 0"
        )
    return call.spread(place)


@placement_rule(aten.batch_norm)
def batch_norm(call: Call) -> Outcome:
    """Statistics over the rows in training; row-local in eval."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return Outcome(place)
    if place.dim == 1:
        raise Refused("the channels of the batch norm are rows of the graph", "transpose its input")
    training = bool(call.arg(5)) or call.arg(3) is None
    return Outcome(place, crosses=training)


@placement_rule(aten.instance_norm)
def instance_norm(call: Call) -> Outcome:
    """Statistics inside one sample and channel: over all ranks where they are over rows, unless running ones are used."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows) or place.dim == 0:
        return Outcome(place)
    if place.dim == 1:
        raise Refused("the channels of the instance norm are rows of the graph", "transpose its input")
    return Outcome(place, crosses=bool(call.named("use_input_stats")))


@placement_rule(aten.group_norm)
def group_norm(call: Call) -> Outcome:
    """Statistics inside one sample: row-local where the rows are the samples."""
    place = call.place(call.arg(0))
    if isinstance(place, Rows) and place.dim != 0:
        raise Refused("it normalises over the rows of the graph", "use batch norm, or mean and var over dim 0")
    return Outcome(place)


@placement_rule(aten.cross, aten.linalg_cross)
def cross_product(call: Call) -> Outcome:
    """The cross product of vectors that each row holds."""
    rank, dim = len(call.out_shape), call.arg(2)
    places = [p for _, p in call.sharded()]
    if any(
        p.dim == (next(d for d, s in enumerate(call.out_shape) if s == 3) if dim is None else wrap(dim, rank))
        for p in places
    ):
        raise Refused("the vectors of a cross product lie along the rows of the graph", "transpose its arguments")
    return pointwise(call)


@placement_rule(aten.bilinear)
def bilinear(call: Call) -> Outcome:
    """``x1 W x2``: rows pass; the weight is replicated."""
    places = [p for _, p in call.sharded()]
    if any(p.dim == len(call.out_shape) - 1 for p in places) or isinstance(call.place(call.arg(2)), Rows):
        raise Refused("the bilinear product sums over the rows of the graph", "put the rows into the first dimension")
    return pointwise(call)


@placement_rule(aten.conv1d, aten.conv2d, aten.conv3d, aten.max_pool1d, aten.max_pool2d, aten.avg_pool1d, aten.avg_pool2d,
                aten.adaptive_avg_pool1d, aten.adaptive_max_pool1d, aten.conv_transpose1d, aten.convolution)  # fmt: skip
def convolution(call: Call) -> Outcome:
    """Dense convolutions of each row's own channels."""
    place = call.place(call.arg(0))
    if any(p for n, p in call.sharded() if n is not call.arg(0)):
        raise Refused("the filter of a convolution has rows of the graph", "use a replicated filter")
    if isinstance(place, Rows) and place.dim != 0:
        raise Refused("it slides over the rows of the graph", "put the rows into the batch dimension")
    return call.spread(place)


@placement_rule(aten.gru_cell, aten.lstm_cell, aten.rnn_tanh_cell, aten.rnn_relu_cell)
def recurrent_cell(call: Call) -> Outcome:
    """One step of a recurrent cell on every row."""
    places = [p for _, p in call.sharded()]
    if any(p.dim != 0 for p in places):
        raise Refused("the rows of a recurrent cell are not its batch", "put the rows into the first dimension")
    same_rows(places)
    return call.spread(places[0] if places else REPLICATED)


@placement_rule(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(call: Call) -> Outcome:
    """A recurrent network along another dimension than the rows', which are its batch."""
    place = call.place(call.arg(0))
    if not isinstance(place, Rows):
        return call.spread(REPLICATED)
    batch_first = bool(call.named("batch_first"))
    if place.dim != (0 if batch_first else 1):
        raise Refused("a recurrent network runs along the rows of the graph", "make the rows its batch dimension")
    state = Rows(place.space, 1, place.factor)
    return Outcome((place, *([state] * (call.results() - 1))))


@placement_rule(aten.scaled_dot_product_attention)
def attention(call: Call) -> Outcome:
    """Attention inside a row; attention of all rows to all rows is dense."""
    places = [p for _, p in call.sharded()]
    rank = len(call.out_shape)
    if any(p.dim >= rank - 2 for p in places):
        raise _DENSE
    if call.arg(4):
        raise Refused(
            "dropout inside scaled_dot_product_attention has no mask by node id", "apply dropout as a layer of its own"
        )
    return pointwise(call)


@placement_rule(aten.cdist)
def distances(call: Call) -> Outcome:
    """Distances of rows to the rows of a replicated table, or inside a row's own matrix; of all rows to all rows they are dense."""
    (left, right), rank = call.node.args[:2], len(call.out_shape)
    first, second = call.place(left), call.place(right)
    for place, own in ((first, left), (second, right)):
        if isinstance(place, Rows) and place.dim == len(call.shape(own)) - 1:
            raise Refused("the distances sum over the rows of the graph", "transpose the operands")
    if isinstance(first, Rows) and isinstance(second, Rows):
        if first.dim == len(call.shape(left)) - 2 or second.dim == len(call.shape(right)) - 2:
            raise Refused("it is the distance of all rows to all rows, a dense matrix",
                          "compute the distances of the pairs that are edges of the graph, or to a table of fixed length")  # fmt: skip
        return pointwise(call)
    if isinstance(first, Rows):
        return Outcome(Rows(first.space, first.dim + rank - len(call.shape(left)), first.factor))
    if isinstance(second, Rows):
        back = len(call.shape(right)) - second.dim
        return Outcome(Rows(second.space, rank - 1 if back == 2 else rank - back, second.factor))
    return Outcome(REPLICATED)


@placement_rule(aten.cosine_similarity, aten.pairwise_distance)
def row_similarity(call: Call) -> Outcome:
    """Similarities along the feature dimension."""
    rank = max(len(call.shape(n)) for n in call.tensors())
    dim = wrap(call.arg(2, default=1), rank) if call.op is aten.cosine_similarity.default else rank - 1
    places = [p for _, p in call.sharded()]
    if not places:
        return Outcome(REPLICATED)
    same_rows(places)
    if any(p.dim == dim for p in places):
        raise Refused("the similarity sums over the rows of the graph", "compute it along the features")
    return Outcome(Rows(places[0].space, places[0].dim - (dim < places[0].dim), places[0].factor))


ELEMENTWISE_LOSSES = (
    aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy, aten.soft_margin_loss,
    aten.binary_cross_entropy_with_logits, aten.kl_div, aten.poisson_nll_loss,
)  # fmt: skip
CLASS_LOSSES = (aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd)


@placement_rule(*ELEMENTWISE_LOSSES, *CLASS_LOSSES)
def loss(call: Call) -> Outcome:
    """Losses: row-local without reduction, else a sum or mean over all ranks' rows."""
    places = [p for _, p in call.sharded()]
    if not places:
        return call.spread(REPLICATED)
    same_rows(places)
    reduction_code = call.named("reduction")
    if any(p.dim != 0 for p in places):
        raise Refused("the rows of a loss are not its first dimension", "transpose its arguments")
    if len(places) < 2:
        raise Refused(
            "a loss compares rows of the graph with a replicated tensor", "shard the targets too: model.shard(...)"
        )
    if reduction_code == 0:
        return call.spread(Rows(places[0].space, 0, places[0].factor))
    return call.spread(REPLICATED, crosses=True)
