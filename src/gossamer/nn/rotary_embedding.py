"""Angles of rotary position embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks
from gossamer.nn._wide_tensors import WideTensors
from gossamer.nn.plain import plain_inference

KEPT_ANGLES = 1 << 21
"""Cosines, and as many sines: 16 MiB in all."""


def _place(tensor: Tensor) -> tuple[torch.device, Any]:
    """The stream to which a tensor made now belongs: another stream would not wait for it."""
    return tensor.device, torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def check_positions(operator: str, position_ids: Tensor | None, x: Tensor) -> None:
    """Raises where position_ids are no whole numbers `[T]` or `[B, T]` of x `[B, T, ...]`."""
    if position_ids is None:
        return
    checks.whole(operator, position_ids=position_ids)
    checks.same_device(operator, "x", x.device, position_ids=position_ids)
    if tuple(position_ids.shape) not in (tuple(x.shape[1:2]), tuple(x.shape[:2])):
        raise ValueError(
            f"{operator}: position_ids must have shape [T] or [B, T] with B, T = {list(x.shape[:2])} like x, got "
            f"{list(position_ids.shape)}."
        )


def size_of_heads(
    operator: str, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None, rotary: bool = True
) -> int:
    """head_dim, or hidden_size // num_heads for None. Raises where heads do not divide, or rotary ones are odd."""
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in (sizes if head_dim is None else sizes | {"head_dim": head_dim}).items():
        checks.positive(operator, name, size, "It is a size.")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"{operator}: num_heads must divide hidden_size where head_dim is None, got {num_heads} and "
                f"{hidden_size}."
            )
        head_dim = hidden_size // num_heads
    if num_heads % num_kv_heads or (rotary and head_dim % 2):
        raise ValueError(
            f"{operator}: num_kv_heads must divide num_heads, and head_dim be even with rotary embeddings, got "
            f"{num_kv_heads}, {num_heads} and {head_dim}."
        )
    return head_dim


class RotaryEmbedding(WideTensors):
    """Angles of rotary position embeddings; `inv_freq` `[D / 2]` is a buffer, in float32 at least.

    A state dict without it, or with one of 16 bits, leaves the frequencies as they are: attention layers of other
    libraries save none.
    """

    _wide_tensors = ("inv_freq",)
    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.register_buffer("inv_freq", theta**-exponents)
        self._first: tuple[Tensor, tuple[Any, ...], tuple[Tensor, Tensor]] | None = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # `load_state_dict` hands on a copy of the dictionary that it was given.
        if state_dict.setdefault(prefix + "inv_freq", self.inv_freq).itemsize < 4:
            state_dict[prefix + "inv_freq"] = self.inv_freq
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The kept tables stay with this module: they belong to a stream, and a copy makes its own."""
        return {**self.__dict__, "_first": None}

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) in float32, `[..., D]`, of integer positions `[...]`."""
        angles = positions[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def of_first(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions 0 to count - 1, beside `like`. In inference they are kept from call to call, up to
        KEPT_ANGLES of them, for six launches are a tenth of a short call; they are not to be written to."""
        if count * self.head_dim > KEPT_ANGLES or not plain_inference(like) or checks.capturing():
            return self(torch.arange(count, device=like.device))
        # A module that was moved or loaded has another buffer, or another version of it, but for writes to `.data`.
        of = self.inv_freq
        if of.is_inference():
            return self(torch.arange(count, device=like.device))
        key = (count, _place(like), of._version)
        # Read once, for another thread may keep others meanwhile.
        kept = self._first
        if kept is None or kept[0] is not of or kept[1] != key:
            kept = self._first = of, key, self(torch.arange(count, device=like.device))
        return kept[2]
