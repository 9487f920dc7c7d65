"""Every convolution of DGL that takes a homogeneous graph."""

from __future__ import annotations

from coverage_cases import Case

CASES: list[Case] = []
