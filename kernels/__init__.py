"""Kernels: the one-bit codec and the neighbour aggregations, each with a readable reference."""

if __name__ != "sylvie_fx.kernels":
    raise ImportError("import sylvie_fx.kernels: this folder is one of its subpackages, and a second copy would not share state")
