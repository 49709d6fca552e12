"""The Transformer++ of the paper, with the parameter names of Hugging Face's Llama (Arcee, without a gate)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._functorch import config as partitioner
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gossamer._core import files
from gossamer.ffn import Activity
from gossamer.nn import MLP, GatedMLP
from gossamer.nn.rotary_embedding import RotaryEmbedding
from gossamer.train.config import Config

STD, EPS, THETA = 0.02, 1e-5, 10_000.0
AGAIN: Any = {"ban_recompute_materialized_backward": False}
"""Compiled layers compute casts of weights and norms again in the backward pass: 2 or 3% of a step, and 6 GiB of 42."""


class Outputs(NamedTuple):
    """Of one call: loss `[]`, the mean cross-entropy; by layer l1 `[L]`, l0 `[L]` and fired `[L, N]`, as in
    `ffn.Activity`. The activity is None where no activation is sparse."""

    loss: Tensor
    activity: Activity | None


class RMSNorm(nn.Module):
    """Root-mean-square norm, in x's dtype whatever the weight's is."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), EPS)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward block, each on a normalised stream and added to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden)
        block = GatedMLP if config.gated else MLP
        self.mlp: Any = block(config.hidden, config.intermediate, config.activation, l1=config.activation != "silu")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Activity | None]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        h = self.post_attention_layernorm(x)
        out, activity = self.mlp(h) if self.mlp.l1 else (self.mlp(h), None)
        return x + out, activity


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)


class Transformer(nn.Module):
    """The paper's Transformer++: RMSNorm, rotary positions, tied embeddings, no biases, weights from N(0, 0.02).

    Args:
        config: its sizes, activation, dtype and seed.

    >>> from gossamer.train import Transformer, preset
    >>> model = Transformer(preset("tiny"))
    >>> model(torch.zeros(2, 65, dtype=torch.int64)).activity.fired.shape
    torch.Size([2, 176])
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.dtype = getattr(torch, config.dtype)
        self.model = Decoder(config)
        self.rotary = RotaryEmbedding(config.hidden // config.heads, THETA)
        generator = torch.Generator().manual_seed(config.seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0, STD, generator=generator)
        if config.compile:
            for layer in self.model.layers:
                layer.compile()
            self._loss: Any = torch.compile(_loss)
        else:
            self._loss = _loss

    def forward(self, tokens: Tensor) -> Outputs:
        """tokens int64 `[B, T + 1]`: each of the first T predicts the next."""
        again: Any = partitioner.patch(AGAIN) if self.config.compile else nullcontext()
        with again, torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            x, activities = self.stream(tokens[:, :-1])
            loss = self._loss(x, self.model.embed_tokens.weight, tokens[:, 1:])
        if activities[0] is None:
            return Outputs(loss, None)
        return Outputs(loss, Activity(*map(torch.stack, zip(*activities))))

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens int64 `[B, T]` -> `[B, T, vocabulary]`."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return F.linear(self.stream(tokens)[0], self.model.embed_tokens.weight)

    def stream(self, tokens: Tensor) -> tuple[Tensor, list[Activity | None]]:
        """tokens int64 `[B, T]` -> (what the output layer takes, `[B, T, hidden]`; the activity of each layer)"""
        x = self.model.embed_tokens(tokens).to(self.dtype)
        cos, sin = (t.to(self.dtype) for t in self.rotary(torch.arange(tokens.shape[1], device=tokens.device)))
        activities = []
        for layer in self.model.layers:
            if self.config.recompute and torch.is_grad_enabled():
                x, activity = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x, activity = layer(x, cos, sin)
            activities.append(activity)
        return self.model.norm(x), activities

    def blocks(self) -> list[Any]:
        """The feed-forward blocks, layer by layer."""
        return [layer.mlp for layer in self.model.layers]

    def gates(self) -> list[nn.Parameter]:
        """By layer the weight that the activation follows, a neuron a row."""
        name = "gate_proj" if self.config.gated else "up_proj"
        return [getattr(block, name).weight for block in self.blocks()]


def _loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).flatten(0, 1).float(), targets.flatten())


def whole(tensors: dict[str, Tensor], write: bool) -> dict[str, Tensor]:
    """Tensors of one rank or of all, on the CPU of the rank that writes them; all ranks call it together."""
    found = {}
    for name, tensor in tensors.items():
        # One at a time: a device has no room for a model that is spread over many.
        own: Any = tensor.detach()
        full = own.full_tensor() if isinstance(own, DTensor) else own
        if write:
            found[name] = full.cpu()
    return found


def save_pretrained(
    model: Transformer, folder: Path, end: int, tokenizer: Path | None = None, write: bool = True
) -> None:
    """Writes the model as Hugging Face's Llama, or Arcee without a gate, in bfloat16 if it computes so.

    Args:
        model: on one rank or sharded; then all ranks call it.
        folder: made if it is not there; its files are replaced, each whole or not at all.
        end: the token that ends a document.
        tokenizer: its tokenizer.json, which is saved beside it if it is there.
        write: False on ranks that only take part.

    >>> save_pretrained(model, Path("model"), end=0)  # doctest: +SKIP
    """
    tensors = whole({name: parameter.to(model.dtype) for name, parameter in model.named_parameters()}, write)
    if not write:
        return
    config = model.config
    kind = ("LlamaForCausalLM", "llama") if config.gated else ("ArceeForCausalLM", "arcee")
    found = {
        "architectures": [kind[0]], "model_type": kind[1], "hidden_act": config.activation,
        "hidden_size": config.hidden, "intermediate_size": config.intermediate, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.heads,
        "head_dim": config.hidden // config.heads, "vocab_size": config.vocabulary, "rms_norm_eps": EPS,
        "rope_theta": THETA, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": config.length, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "initializer_range": STD, "bos_token_id": end, "eos_token_id": end,
        "torch_dtype": config.dtype,
    }  # fmt: skip
    files.make_folder("train", "out", folder)
    contents = {"config.json": json.dumps(found, indent=1)}
    if tokenizer is not None and tokenizer.exists():
        contents["tokenizer.json"] = tokenizer.read_text()
        added = json.loads(contents["tokenizer.json"])["added_tokens"]
        token = next((each["content"] for each in added if each["id"] == end), None)
        known = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": token, "eos_token": token}
        contents["tokenizer_config.json"] = json.dumps(known)
    for name, content in contents.items():
        files.write_text("train", folder / name, content)
    weights = folder / "model.safetensors"
    files.write_whole("train", weights, lambda path: save_file(tensors, path, {"format": "pt"}))
