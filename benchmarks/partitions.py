"""Halo rows (what is sent) and edge cut by partition method, on the graphs that are here.

python benchmarks/partitions.py [--parts 4 8] [--data cora citeseer]
"""

from __future__ import annotations

import argparse
import time

from sylvie_fx.graphs.datasets import available, load_npz
from sylvie_fx.graphs.partition import PartitionQuality, partition_nodes
from sylvie_fx.ir.errors import PartitionError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--data", nargs="*")
    parser.add_argument("--methods", nargs="*", default=["metis", "metis-volume", "hypergraph", "random"])
    options = parser.parse_args()
    print("| data | parts | method | halo rows | / metis | edge cut | largest part / mean | seconds |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in options.data or available():
        graph = load_npz(name)
        src, dst = graph.edge_index
        for parts in options.parts:
            base = 0
            for method in options.methods:
                start = time.perf_counter()
                try:
                    assignment = partition_nodes(len(graph.y), src, dst, parts, method)
                except PartitionError as error:
                    print(f"| {name} | {parts} | {method} | {error.what} | | | | |")
                    continue
                seconds = time.perf_counter() - start
                quality = PartitionQuality.measure(assignment, src, dst, parts)
                halo = sum(quality.halo)
                base = base or halo
                print(
                    f"| {name} | {parts} | {method} | {halo:,} | {halo / base:.2f} | {quality.edge_cut / len(src):.3f} "
                    f"| {quality.balance:.2f} | {seconds:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
