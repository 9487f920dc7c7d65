"""Keep this rank's rows of a user's data: loose tensors, sparse adjacencies, PyG Data, DGLGraphs."""

from sylvie_fx.sharding.frontends import frontends
from sylvie_fx.sharding.shard import shard

__all__ = ["frontends", "shard"]
