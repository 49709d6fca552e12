"""Hugging Face models: gated MLPs on fused products, attention over selected keys, activations as a source of rows."""

from gossamer.integrations.transformers._activations import Activations
from gossamer.integrations.transformers._attention import (
    calibrate,
    indexer_loss,
    patch_attention,
    register_selection,
    train_indexers,
)
from gossamer.integrations.transformers._load_sparse import load_sparse
from gossamer.integrations.transformers._mlp import patch
from gossamer.integrations.transformers._training import activity, sparsity_callback
from gossamer.integrations.transformers._unpatch import unpatch

__all__ = [
    "Activations",
    "activity",
    "calibrate",
    "indexer_loss",
    "load_sparse",
    "patch",
    "patch_attention",
    "register_selection",
    "sparsity_callback",
    "train_indexers",
    "unpatch",
]
