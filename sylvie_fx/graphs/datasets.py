"""Real graphs for demos, tests and benchmarks: read from disk, never made up, never required."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sylvie_fx.ir.errors import OptionError, PartitionError

#: The variable that names a folder of .npz graphs.
DATA_VARIABLE = "SYLVIE_FX_DATA"
#: Seconds that a download may take before the demo takes the graph that needs none.
_DOWNLOAD_SECONDS = 20.0
_SPLIT = (0.6, 0.8)


@dataclass(frozen=True, eq=False)
class GraphData:
    """One graph with labelled nodes.

    Attributes:
        name: Where it comes from.
        x: float32 (N, F), features.
        y: int64 (N,), class; -1 is unlabelled and in no mask.
        edge_index: int64 (2, E), both directions of each undirected edge.
        train_mask: bool (N,).
        val_mask: bool (N,).
        test_mask: bool (N,).
        num_classes: Number of classes.
    """

    name: str
    x: Tensor
    y: Tensor
    edge_index: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    num_classes: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.y.numel()

    def __str__(self) -> str:
        """Sizes on one line."""
        return (
            f"{self.name}: {self.num_nodes:,} nodes, {self.edge_index.shape[1]:,} edges, {self.x.shape[1]:,} features, "
            f"{self.num_classes} classes"
        )


def data_folder() -> Path | None:
    """The folder of real graphs: what SYLVIE_FX_DATA names, else shared/data beside the checkout, else None."""
    named = os.environ.get(DATA_VARIABLE)
    if named:
        return Path(named)
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return beside if beside.is_dir() else None


def available() -> list[str]:
    """Names that ``load_npz`` finds, sorted."""
    folder = data_folder()
    return sorted(path.stem for path in folder.glob("*.npz")) if folder else []


def load_npz(name: str, features: str | None = None) -> GraphData:
    """One of the real graphs by name.

    Args:
        name: File name without ``.npz``: "cora", "coauthor_physics", …
        features: None for the raw values, or a normalisation of ``normalise``.

    Raises:
        FileNotFoundError: There is no folder of graphs, or no such graph in it; the text lists those that are there.
        PartitionError: The file lacks one of the arrays.
        OptionError: An unknown normalisation.
    """
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError(f"no folder of graphs: set {DATA_VARIABLE} to one with {name}.npz")
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no graph {name!r}, only {', '.join(available()) or 'nothing'}")
    with np.load(path, allow_pickle=False) as file:
        arrays = {key: file[key] for key in file.files}
    missing = {"edge_index", "y", "train_mask", "val_mask", "test_mask"} - set(arrays)
    if missing or not ({"x"} <= set(arrays) or {"x_indptr", "x_indices", "x_data", "x_shape"} <= set(arrays)):
        raise PartitionError(f"{path.name} lacks {', '.join(sorted(missing)) or 'its features'}")
    x = torch.from_numpy(arrays["x"]).float() if "x" in arrays else _densify(arrays)
    y = torch.from_numpy(arrays["y"].astype(np.int64))
    return GraphData(
        name=name,
        x=x if features is None else normalise(x, features),
        y=y,
        edge_index=torch.from_numpy(arrays["edge_index"].astype(np.int64)),
        train_mask=torch.from_numpy(arrays["train_mask"]),
        val_mask=torch.from_numpy(arrays["val_mask"]),
        test_mask=torch.from_numpy(arrays["test_mask"]),
        num_classes=int(y.max()) + 1,
    )


def normalise(x: Tensor, how: str) -> Tensor:
    """Features on a common scale, as a new tensor.

    Args:
        x: float (N, F).
        how: "row" (rows divided by their sum), "l2" (rows of unit length), "bin" (0 or 1), "std" (columns of mean 0 and
            deviation 1). Rows of zeros and constant columns stay finite.

    Raises:
        OptionError: Another word.
    """
    if how == "row":
        return x / x.sum(1, keepdim=True).clamp(min=1e-12)
    if how == "l2":
        return torch.nn.functional.normalize(x, dim=1)
    if how == "bin":
        return (x > 0).to(x.dtype)
    if how == "std":
        return (x - x.mean(0)) / x.std(0, correction=0).clamp(min=1e-12)
    raise OptionError(f"features are normalised by row, l2, bin or std, not {how!r}")


def demo_graph() -> GraphData:
    """A real graph on any machine: Cora from the folder of graphs, else through PyG, else neighbours among digits.

    Raises:
        ModuleNotFoundError: None of them is there, scikit-learn included.
    """
    if "cora" in available():
        return load_npz("cora", "row")
    return _cora_of_pyg() or digits_graph()


def digits_graph(neighbours: int = 10) -> GraphData:
    """The nearest-neighbour graph of scikit-learn's 1,797 bundled handwritten digits, split 60/20/20 at random.

    Args:
        neighbours: Nearest neighbours of each image that it is joined with.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    images, classes = load_digits(return_X_y=True)
    near = kneighbors_graph(images, neighbours).tocoo()
    edge_index = undirected(torch.from_numpy(np.stack([near.row, near.col]).astype(np.int64)), len(classes))
    y = torch.from_numpy(classes.astype(np.int64))
    x = torch.from_numpy(images.astype(np.float32) / 16.0)
    return GraphData("digits", x, y, edge_index, *random_masks(len(classes), 0), num_classes=10)


def random_masks(num_nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test masks of a random 60/20/20 split, each bool (N,)."""
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    first, second = (round(share * num_nodes) for share in _SPLIT)
    masks = torch.zeros(3, num_nodes, dtype=torch.bool)
    for mask, nodes in zip(masks, (order[:first], order[first:second], order[second:]), strict=True):
        mask[nodes] = True
    return masks[0], masks[1], masks[2]


def undirected(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Both directions of every edge once, without self loops, sorted by source: int64 (2, E)."""
    src, dst = edge_index[:, edge_index[0] != edge_index[1]]
    pairs = torch.unique(torch.cat([src * num_nodes + dst, dst * num_nodes + src]))
    return torch.stack([pairs // num_nodes, pairs % num_nodes])


def _densify(arrays: dict[str, np.ndarray]) -> Tensor:
    """The features of a CSR matrix as float32 (N, F)."""
    rows, columns = (int(size) for size in arrays["x_shape"])
    x = torch.zeros(rows, columns)
    lengths = torch.from_numpy(np.diff(arrays["x_indptr"]).astype(np.int64))
    row = torch.repeat_interleave(torch.arange(rows), lengths)
    x[row, torch.from_numpy(arrays["x_indices"].astype(np.int64))] = torch.from_numpy(arrays["x_data"]).float()
    return x


def _cora_of_pyg() -> GraphData | None:
    """Cora through PyG, which downloads it once, or None where PyG or the network is missing or slow."""
    try:
        from torch_geometric.datasets import Planetoid
    except ImportError:
        return None

    def load() -> GraphData:
        data = Planetoid(str(Path.home() / ".cache" / "sylvie_fx"), "Cora")[0]
        masks = (data.train_mask, data.val_mask, data.test_mask)
        return GraphData("cora", normalise(data.x, "row"), data.y, data.edge_index, *masks, num_classes=7)

    return _within(_DOWNLOAD_SECONDS, load)


def _within(seconds: float, load: Callable[[], GraphData]) -> GraphData | None:
    """The graph, or None where loading fails or takes too long: a demo has another one."""
    loaded: list[GraphData] = []

    def attempt() -> None:
        try:
            loaded.append(load())
        except Exception:  # a thread's boundary: downloads fail in as many ways as there are networks
            return

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    return loaded[0] if loaded else None
