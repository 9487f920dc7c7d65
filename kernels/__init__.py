"""Kernels: the one-bit codec and the neighbour aggregations, each with a readable reference."""

if __name__ != "sylvie_fx.kernels":
    raise ImportError(
        "import sylvie_fx.kernels: this folder is one of its subpackages, and a second copy would not share state"
    )

from sylvie_fx.kernels.codec import Mode, decode, decode_peers, encode, encode_peers
from sylvie_fx.kernels.wire import CodecSpec, MessageLayout, Rounding, Variant, message_bytes

__all__ = [
    "CodecSpec",
    "MessageLayout",
    "Mode",
    "Rounding",
    "Variant",
    "decode",
    "decode_peers",
    "encode",
    "encode_peers",
    "message_bytes",
]
