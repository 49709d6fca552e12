"""Sparse autoencoders: encode to row-sparse latents, decode from them."""

from gossamer.sae.count_fired import count_fired
from gossamer.sae.decode import decode
from gossamer.sae.encode import encode
from gossamer.sae.tanh_l0 import tanh_l0

__all__ = ["count_fired", "decode", "encode", "tanh_l0"]
