"""Hugging Face models: their gated MLPs on fused products, and their activations as a source of rows."""

from gossamer.integrations.transformers._activations import Activations
from gossamer.integrations.transformers._mlp import Report, patch, unpatch

__all__ = ["Activations", "Report", "patch", "unpatch"]
