"""Modules: they hold parameters and call the functions of the rooms below."""

from gossamer.nn.checkpoint import load, save
from gossamer.nn.sae import BatchTopKSAE, JumpReLUSAE, SAELoss, TopKSAE

__all__ = ["BatchTopKSAE", "JumpReLUSAE", "SAELoss", "TopKSAE", "load", "save"]
