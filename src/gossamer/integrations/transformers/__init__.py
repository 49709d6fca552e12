"""Hugging Face models: gated MLPs on fused products, attention over selected keys, activations as a source of rows."""

from gossamer.integrations.transformers._activations import Activations
from gossamer.integrations.transformers._attention import (
    AttentionReport,
    calibrate,
    indexer_loss,
    patch_attention,
    register_selection,
    unpatch_attention,
    warm_up,
)
from gossamer.integrations.transformers._load_sparse import load_sparse
from gossamer.integrations.transformers._mlp import Report, patch, unpatch
from gossamer.integrations.transformers._training import activity, sparsity_callback

__all__ = [
    "Activations",
    "AttentionReport",
    "Report",
    "activity",
    "calibrate",
    "indexer_loss",
    "load_sparse",
    "patch",
    "patch_attention",
    "register_selection",
    "sparsity_callback",
    "unpatch",
    "unpatch_attention",
    "warm_up",
]
