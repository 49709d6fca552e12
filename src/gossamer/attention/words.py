"""Words of selected keys, and masks: by views of bytes, on any device."""

import torch
from torch import Tensor

from gossamer.attention.records import QUERIES


def words_of_mask(mask: Tensor) -> Tensor:
    """Words int64 `[B, S, ceil(Tq / 64), Tk]` of a bool mask `[B, S, Tq, Tk]`. Byte j of a word belongs to the queries
    8 j to 8 j + 7 of its 64."""
    b, s, tq, tk = mask.shape
    blocks = -(-tq // QUERIES)
    if tq % QUERIES:
        mask = torch.nn.functional.pad(mask, (0, 0, 0, -tq % QUERIES))
    rows = mask.view(torch.uint8).unflatten(2, (blocks, 8, 8))
    eighths = (rows << _eight(mask.device)).sum(4, dtype=torch.uint8)
    words = eighths.new_empty(b, s, blocks, tk, 8).copy_(eighths.transpose(3, 4))
    return words.view(torch.int64).squeeze(4)


def mask_of_words(words: Tensor, num_queries: int) -> Tensor:
    """The inverse of `words_of_mask`."""
    eighths = words.unsqueeze(4).view(torch.uint8).transpose(3, 4)
    rows = (eighths[:, :, :, :, None] >> _eight(words.device)).bitwise_and_(1).view(torch.bool)
    return rows.flatten(2, 4)[:, :, :num_queries]


def _eight(device: torch.device) -> Tensor:
    """The numbers of a byte's bits, as a column."""
    return torch.arange(8, dtype=torch.uint8, device=device)[:, None]
