"""Words of selected keys, on the CPU: eight keys at a time, side by side in a number of 64 bits."""

import torch
from torch import Tensor

from gossamer.attention.records import QUERIES, MaskOfWords, WordsOfMask


def _bits(device: torch.device) -> Tensor:
    """The numbers of a byte's bits. Byte j of a word belongs to the queries 8 j to 8 j + 7 of its 64."""
    return torch.arange(8, device=device)[:, None]


def words_of_mask(call: WordsOfMask) -> Tensor:
    """Operator `words_of_mask`."""
    (mask,) = call
    b, s, tq, tk = mask.shape
    blocks = -(-tq // QUERIES)
    if tq % QUERIES or tk % 8:
        mask = torch.nn.functional.pad(mask, (0, -tk % 8, 0, -tq % QUERIES))
    rows = mask.flatten().view(torch.int64).view(b, s, blocks, 8, 8, -(-tk // 8))
    octets = (rows << _bits(mask.device)).sum(4).view(torch.uint8)[..., :tk]
    words = octets.new_empty(b, s, blocks, tk, 8).copy_(octets.transpose(3, 4))
    return words.flatten().view(torch.int64).view(b, s, blocks, tk)


def mask_of_words(call: MaskOfWords) -> Tensor:
    """Operator `mask_of_words`."""
    words, num_queries = call
    b, s, blocks, tk = words.shape
    eights = -(-tk // 8)
    octets = words.new_empty(b, s, blocks, 8, 8 * eights, dtype=torch.uint8)
    octets[..., :tk] = words.unsqueeze(4).view(torch.uint8).transpose(3, 4)
    rows = octets.flatten().view(torch.int64).view(b, s, blocks, 8, 1, eights) >> _bits(words.device)
    mask = rows.bitwise_and_(0x0101010101010101).view(torch.bool)
    return mask.flatten(2, 4)[:, :, :num_queries, :tk].contiguous()
