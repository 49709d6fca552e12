"""Extraction: activations as a stream, through an autoencoder, to shards of row-sparse latents on disk."""

from gossamer.extract.extract import extract
from gossamer.extract.extraction import Extraction

__all__ = ["Extraction", "extract"]
