"""The compiled part of the build: the CPU codec. Everything else stands in pyproject.toml.

The extension is optional: without a C++ compiler (GCC or Clang, whose vector types it is written with) the package
installs, and the codec's torch reference serves.
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
        )
    ]
)
