"""Modules: they hold parameters and call the functions of the rooms below."""

from gossamer.nn.checkpoint import load, save
from gossamer.nn.distributed import data_parallel, shard
from gossamer.nn.sae import BatchTopKSAE, JumpReLUSAE, SAELoss, TopKSAE

__all__ = ["BatchTopKSAE", "JumpReLUSAE", "SAELoss", "TopKSAE", "data_parallel", "load", "save", "shard"]
