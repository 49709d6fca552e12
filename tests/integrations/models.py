"""Inputs and results of small models of transformers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def tokens(device: torch.device, batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    extra = {"decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **extra, **options).logits


def exact_logits(model: Any, ids: Tensor) -> Tensor:
    """In float64, which the CPU has."""
    return logits(copy.deepcopy(model).cpu().double(), ids.cpu()).to(ids.device)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the last backward pass, by parameter."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare_gradients(got: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float, atol: float) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=rtol, atol=atol, msg=name)
