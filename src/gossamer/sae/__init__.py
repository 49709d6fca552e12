"""Sparse autoencoders: encode to row-sparse latents, decode from them."""

from gossamer.sae.count_fired import count_fired
from gossamer.sae.decode import decode
from gossamer.sae.encode import encode, encode_with_l0
from gossamer.sae.sharded import decode_sharded, encode_sharded, encode_sharded_with_l0
from gossamer.sae.tanh_l0 import tanh_l0

__all__ = [
    "count_fired",
    "decode",
    "decode_sharded",
    "encode",
    "encode_sharded",
    "encode_sharded_with_l0",
    "encode_with_l0",
    "tanh_l0",
]
