"""Dropout of attention's probabilities, by numbers that are computed anew wherever they are needed.

Whether a probability is kept follows from a seed and its (batch, head, query, key) by Philox 4x32 of 7 rounds (Salmon
et al. 2011), so that no mask is stored, and every path, device and pass drops the same ones.
"""

from typing import Any

import torch
from torch import Tensor

from gossamer._core import checks

ROUNDS = 7
_LOW = 0xFFFFFFFF


def settled(
    operator: str, dropout: float, seed: int | Tensor | None, device: torch.device
) -> tuple[int, Tensor | None]:
    """(how many of 2^31 numbers drop a probability, the seed as int64 `[1]`), or (0, None) without dropout.

    A seed of None is drawn from PyTorch's generator of the device.
    """
    if seed is not None:
        _check_seed(operator, seed, device)
    if dropout == 0 and not isinstance(dropout, bool):
        return 0, None
    if not isinstance(dropout, float) or not 0 < dropout < 1:
        raise ValueError(
            f"{operator}: dropout must be a float of at least 0 and below 1, the probability that an entry is dropped, "
            f"got {dropout!r}. Give a probability such as 0.1, or 0.0 to drop none."
        )
    if seed is None:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=device)
    elif isinstance(seed, Tensor):
        seed = seed.detach().reshape(1)
    else:
        seed = torch.full((1,), seed, dtype=torch.int64, device=device)
    return min(round(dropout * (1 << 31)), (1 << 31) - 1), seed


def _check_seed(operator: str, seed: Any, device: torch.device) -> None:
    rule = f"{operator}: seed must be an int in [-2^63, 2^63), or an int64 tensor of one element"
    if isinstance(seed, Tensor):
        checks.same_device(operator, "q", device, seed=seed)
        if seed.dtype is not torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"{rule}, got {checks.name_of(seed.dtype)} {list(seed.shape)}. Use torch.tensor([n]) of an int n."
            )
    elif not isinstance(seed, int | torch.SymInt) or isinstance(seed, bool):
        raise TypeError(f"{rule}, got {type(seed).__name__}. Give None to have one drawn.")
    elif not -(1 << 63) <= seed < 1 << 63:
        raise ValueError(f"{rule}, got {seed}. Take it modulo 2^63.")


def kept(seed: Tensor, pair: Any, query: Tensor, key: Tensor, drop: int) -> Tensor:
    """bool, whether probabilities of a head, counted over batches, of queries and keys are kept; int64 that
    broadcast."""
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    c0, c1, c2, c3 = key, query, torch.as_tensor(pair), key * 0
    for _ in range(ROUNDS):
        # The product wraps around in 64 bits, whose upper half is read without a sign.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0 >> 1 >= drop


def weights(seed: Tensor, pair: Any, query: Tensor, key: Tensor, drop: int, dtype: torch.dtype) -> Tensor:
    """The factors of probabilities: 0, or 1 / (1 - p) of those that are kept."""
    return kept(seed, pair, query, key, drop).to(dtype) / (1 - drop / (1 << 31))
