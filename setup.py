"""The compiled part of the build: the CPU codec. Everything else stands in pyproject.toml.

The extension is optional: without a C++ compiler the package installs, and the codec's torch reference serves.
"""

import sys

from setuptools import Extension, setup

# No contraction to fused multiply-adds: a moved threshold would change the bytes between machines.
POSIX_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
WINDOWS_FLAGS = ["/std:c++17", "/O2", "/fp:precise"]

setup(
    ext_modules=[
        Extension(
            "sylvie_fx.kernels._codec",
            sources=["kernels/codec.cpp"],
            depends=["kernels/codec.h", "kernels/codec_rows.inc"],
            extra_compile_args=WINDOWS_FLAGS if sys.platform == "win32" else POSIX_FLAGS,
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
