"""Matrices of which only some blocks are stored: layouts, tensors, and their operators."""

from gossamer.blocksparse.attention import attention
from gossamer.blocksparse.layout import Layout

__all__ = ["Layout", "attention"]
