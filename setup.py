"""The compiled part of the build: the CPU codec, aggregations, dropout and scores of nodes. Everything else stands in pyproject.toml.

The extensions are optional: without a C++ compiler (GCC or Clang, whose vector types they are written with) the package
installs, and the torch references serve.
"""

from glob import glob

from setuptools import Extension, setup

# No contraction to fused multiply-adds: a moved threshold would change the bytes between machines.
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread", "-g0"]

setup(
    ext_modules=[
        Extension(
            "sylvie_fx.kernels._codec",
            sources=["kernels/codec.cpp"],
            depends=["kernels/codec.h", *sorted(glob("kernels/codec_*.inc"))],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
        Extension(
            "sylvie_fx.kernels._dropout",
            sources=["kernels/dropout.cpp"],
            depends=["kernels/keyed_mask.h"],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
        Extension(
            "sylvie_fx.kernels._row_dots",
            sources=["kernels/row_dots.cpp"],
            # As for aggregations: rounding may differ, and contraction is what makes product and sum one instruction.
            extra_compile_args=["-ffp-contract=fast" if flag == "-ffp-contract=off" else flag for flag in FLAGS],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
        Extension(
            "sylvie_fx.kernels._aggregate",
            sources=["kernels/aggregate.cpp"],
            depends=["kernels/aggregate.h", "kernels/keyed_mask.h", *sorted(glob("kernels/aggregate_*.inc"))],
            # Sums agree with the reference to rounding anyway, and contraction is what makes them one instruction.
            extra_compile_args=["-ffp-contract=fast" if flag == "-ffp-contract=off" else flag for flag in FLAGS],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        ),
    ]
)
