"""Whether a tensor was written into since it was last looked at."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


def version(tensor: Tensor) -> int:
    """How often a tensor was written into; always zero for one made in inference mode, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def stamp(tensor: Tensor) -> int | str:
    """What changes with every write: the version, or a digest of the entries of a tensor made in inference mode."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not tensor.is_inference() or not plain:
        return version(tensor)
    with torch.inference_mode(), _disable_current_modes():
        entries = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.blake2b(entries.numpy().data, digest_size=16).hexdigest()
