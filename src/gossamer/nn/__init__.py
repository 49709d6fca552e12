"""Modules: they hold parameters and call the functions of the rooms below."""

from gossamer.nn.checkpoint import load, save
from gossamer.nn.sae import JumpReLUSAE, SAELoss, TopKSAE

__all__ = ["JumpReLUSAE", "SAELoss", "TopKSAE", "load", "save"]
