"""Whether a tensor was written into since it was last looked at."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

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
    return hashlib.blake2b(_memory(tensor), digest_size=16).hexdigest()


def _memory(tensor: Tensor) -> Any:
    """The bytes of a tensor's entries; of one with gaps, those of all that it is a view of.

    No operator runs on host memory: one would be traced where a model is being captured, and switching tracing off switches
    it off for a capture in another thread too, since torch's modes before dispatch belong to the process.
    """
    if tensor.device.type != "cpu":  # ranks on such devices are processes
        with torch.inference_mode(), _disable_current_modes():
            return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    with torch._C.DisableTorchFunction():
        if tensor.is_contiguous():
            address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
    return (ctypes.c_char * size).from_address(address) if size else b""
