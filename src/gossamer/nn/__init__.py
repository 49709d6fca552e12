"""Modules: they hold parameters and call the functions of the rooms below."""

from gossamer.nn.attention_cache import AttentionCache
from gossamer.nn.block_sparse_attention import BlockSparseAttention
from gossamer.nn.block_sparse_linear import BlockSparseLinear
from gossamer.nn.block_sparse_rowwise import BlockSparseRowwise
from gossamer.nn.checkpoint import load_sae, save_sae
from gossamer.nn.cross_layer import Crosscoder, CrossLayerTranscoder
from gossamer.nn.distributed import data_parallel_sae, shard_sae
from gossamer.nn.gated_sparse_attention import GatedSparseAttention
from gossamer.nn.jumprelu import JumpReLUSAE
from gossamer.nn.matryoshka import MatryoshkaBatchTopKSAE, MatryoshkaSAE
from gossamer.nn.mlp import MLP, GatedMLP
from gossamer.nn.neuron_parallel import NeuronParallel
from gossamer.nn.penalised import GatedSAE, StandardSAE
from gossamer.nn.sae import BatchTopKSAE, SAELoss, TopKSAE
from gossamer.nn.transcoder import BatchTopKTranscoder, JumpReLUTranscoder, Transcoder

__all__ = [
    "AttentionCache",
    "BatchTopKSAE",
    "BatchTopKTranscoder",
    "BlockSparseAttention",
    "BlockSparseLinear",
    "BlockSparseRowwise",
    "CrossLayerTranscoder",
    "Crosscoder",
    "GatedMLP",
    "GatedSAE",
    "GatedSparseAttention",
    "JumpReLUSAE",
    "JumpReLUTranscoder",
    "MLP",
    "MatryoshkaBatchTopKSAE",
    "MatryoshkaSAE",
    "NeuronParallel",
    "SAELoss",
    "StandardSAE",
    "TopKSAE",
    "Transcoder",
    "data_parallel_sae",
    "load_sae",
    "save_sae",
    "shard_sae",
]
