"""Sparse autoencoders: encode to row-sparse latents, decode from them."""

from gossamer.sae.decode import decode

__all__ = ["decode"]
