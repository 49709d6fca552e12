"""Words of selected keys, and masks: by views of bytes, on any device."""

import torch
from torch import Tensor

from gossamer.attention.records import QUERIES


def words_of_mask(mask: Tensor) -> Tensor:
    """Words int64 `[B, S, ceil(Tq / 64), Tk]` of a bool mask `[B, S, Tq, Tk]`. Byte j of a word belongs to the queries
    8 j to 8 j + 7 of its 64."""
    b, s, tq, tk = mask.shape
    blocks = -(-tq // QUERIES)
    if tq % QUERIES or tk % 8:
        mask = torch.nn.functional.pad(mask, (0, -tk % 8, 0, -tq % QUERIES))
    # Eight keys side by side: the bit of each in its own byte.
    rows = mask.flatten().view(torch.int64).view(b, s, blocks, 8, 8, -(-tk // 8))
    octets = (rows << _eight(mask.device)).sum(4).view(torch.uint8)[..., :tk]
    words = octets.new_empty(b, s, blocks, tk, 8).copy_(octets.transpose(3, 4))
    return words.flatten().view(torch.int64).view(b, s, blocks, tk)


def mask_of_words(words: Tensor, num_queries: int) -> Tensor:
    """The inverse of `words_of_mask`."""
    b, s, blocks, tk = words.shape
    eights = -(-tk // 8)
    octets = words.new_empty(b, s, blocks, 8, 8 * eights, dtype=torch.uint8)
    octets[..., :tk] = words.unsqueeze(4).view(torch.uint8).transpose(3, 4)
    rows = octets.flatten().view(torch.int64).view(b, s, blocks, 8, 1, eights) >> _eight(words.device)
    mask = rows.bitwise_and_(0x0101010101010101).view(torch.bool)
    return mask.flatten(2, 4)[:, :, :num_queries, :tk]


def _eight(device: torch.device) -> Tensor:
    """The numbers of a byte's bits, as a column."""
    return torch.arange(8, device=device)[:, None]
