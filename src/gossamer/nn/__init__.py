"""Modules: they hold parameters and call the functions of the rooms below."""

from gossamer.nn.attention_cache import AttentionCache
from gossamer.nn.block_sparse_attention import BlockSparseAttention
from gossamer.nn.block_sparse_linear import BlockSparseLinear
from gossamer.nn.block_sparse_rowwise import BlockSparseRowwise
from gossamer.nn.checkpoint import load, save
from gossamer.nn.distributed import data_parallel, shard
from gossamer.nn.gated_sparse_attention import GatedSparseAttention
from gossamer.nn.gated_sparse_reference import GatedSparseAttentionReference
from gossamer.nn.jumprelu import JumpReLUSAE
from gossamer.nn.median import geometric_median
from gossamer.nn.mlp import MLP, GatedMLP
from gossamer.nn.neuron_parallel import NeuronParallel
from gossamer.nn.sae import BatchTopKSAE, SAELoss, TopKSAE
from gossamer.nn.transcoder import Transcoder

__all__ = [
    "AttentionCache",
    "BatchTopKSAE",
    "BlockSparseAttention",
    "BlockSparseLinear",
    "BlockSparseRowwise",
    "GatedMLP",
    "GatedSparseAttention",
    "GatedSparseAttentionReference",
    "JumpReLUSAE",
    "MLP",
    "NeuronParallel",
    "SAELoss",
    "TopKSAE",
    "Transcoder",
    "data_parallel",
    "geometric_median",
    "load",
    "save",
    "shard",
]
