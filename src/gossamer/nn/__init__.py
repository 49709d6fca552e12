"""Modules: they hold parameters and call the functions of the rooms below."""

from gossamer.nn.block_sparse_rowwise import BlockSparseRowwise
from gossamer.nn.checkpoint import load, save
from gossamer.nn.distributed import data_parallel, shard
from gossamer.nn.gated_sparse_attention import GatedSparseAttention, GatedSparseAttentionReference
from gossamer.nn.mlp import MLP, GatedMLP
from gossamer.nn.sae import BatchTopKSAE, JumpReLUSAE, SAELoss, TopKSAE, geometric_median
from gossamer.nn.transcoder import Transcoder

__all__ = [
    "MLP",
    "BatchTopKSAE",
    "BlockSparseRowwise",
    "GatedMLP",
    "GatedSparseAttention",
    "GatedSparseAttentionReference",
    "JumpReLUSAE",
    "SAELoss",
    "TopKSAE",
    "Transcoder",
    "data_parallel",
    "geometric_median",
    "load",
    "save",
    "shard",
]
