"""Distribute an unmodified full-graph GNN over k processes: ``model = sylvie_fx.distribute(model)``."""

from sylvie_fx.dgl_import import install_import_shim

install_import_shim()  # before anything can import DGL

from sylvie_fx.api import DistributedModule, distribute  # noqa: E402
from sylvie_fx.debug import DebugOptions  # noqa: E402
from sylvie_fx.graphs.book import PartitionBook, partition  # noqa: E402
from sylvie_fx.ir.errors import SylvieError  # noqa: E402
from sylvie_fx.ir.options import Options  # noqa: E402
from sylvie_fx.ir.rules import placement_rule  # noqa: E402
from sylvie_fx.node_tensor import NodeTensor  # noqa: E402
from sylvie_fx.passes.base import Pass, PassContext  # noqa: E402
from sylvie_fx.passes.manager import PassManager  # noqa: E402
from sylvie_fx.passes.pipeline import default_passes  # noqa: E402
from sylvie_fx.stats import Stats  # noqa: E402
from sylvie_fx.verify import VerifyReport, verify  # noqa: E402

__all__ = [
    "DebugOptions",
    "DistributedModule",
    "NodeTensor",
    "Options",
    "PartitionBook",
    "Pass",
    "PassContext",
    "PassManager",
    "Stats",
    "SylvieError",
    "VerifyReport",
    "default_passes",
    "distribute",
    "partition",
    "placement_rule",
    "verify",
]
