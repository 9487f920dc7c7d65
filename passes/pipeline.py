"""The default pipeline."""

from __future__ import annotations

from sylvie_fx.passes.bucket_gradients import BucketGradients
from sylvie_fx.passes.canonicalize import Canonicalize
from sylvie_fx.passes.decompose import Decompose
from sylvie_fx.passes.functionalize import Functionalize
from sylvie_fx.passes.fuse_aggregation import FuseAggregation
from sylvie_fx.passes.fuse_attention import FuseAttention, FuseScores
from sylvie_fx.passes.fuse_dots import FuseDots
from sylvie_fx.passes.fuse_relu import FuseRelu
from sylvie_fx.passes.fuse_softmax import FuseSoftmax
from sylvie_fx.passes.global_reductions import GlobalReductions
from sylvie_fx.passes.infer_placement import InferPlacement
from sylvie_fx.passes.insert_halo import InsertHalo
from sylvie_fx.passes.keep_aggregations import KeepAggregations
from sylvie_fx.passes.manager import PassManager
from sylvie_fx.passes.merge_reductions import MergeReductions
from sylvie_fx.passes.order_linear import OrderLinear
from sylvie_fx.passes.place_halos import PlaceHalos
from sylvie_fx.passes.quantize import Quantize
from sylvie_fx.passes.sample_check import SampleCheck
from sylvie_fx.passes.schedule import Schedule
from sylvie_fx.passes.share_duplicates import ShareDuplicates
from sylvie_fx.passes.split_exchanges import SplitExchanges
from sylvie_fx.passes.split_prologue import SplitPrologue
from sylvie_fx.passes.sync_gradients import SyncGradients


def default_passes() -> PassManager:
    """The passes that distribute() runs, in order."""
    return PassManager([
        Functionalize(),
        Decompose(),
        Canonicalize(),
        SampleCheck(),
        SplitPrologue(),
        InferPlacement(),
        GlobalReductions(),
        InsertHalo(),
        FuseSoftmax(),
        FuseAggregation(),
        FuseAttention(),
        FuseScores(),
        ShareDuplicates(),
        OrderLinear(),
        PlaceHalos(),
        FuseRelu(),
        FuseDots(),
        KeepAggregations(),
        Quantize(),
        SyncGradients(),
        MergeReductions(),
        SplitExchanges(),
        Schedule(),
        BucketGradients(),
    ])  # fmt: skip
