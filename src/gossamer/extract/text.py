"""The text that rows of activations belong to: a token a row, and the spelling of each token."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Text:
    """The text of a source of rows.

    Args:
        tokens: int32 `[rows]`.
        starts: bool `[rows]`; True where the row begins a text that does not go on from the row before.
        vocabulary: token -> spelling. A byte that is no whole character is a lone surrogate, as Python's
            "surrogateescape" has it.
    """

    tokens: Tensor
    starts: Tensor
    vocabulary: Mapping[int, str]

    def fingerprint(self) -> str:
        """A digest of the text."""
        digest = hashlib.sha256(json.dumps(sorted(self.vocabulary.items())).encode())
        for tensor in (self.tokens, self.starts):
            digest.update(tensor.numpy().data)
        return digest.hexdigest()

    def spelling(self) -> bytes:
        """The vocabulary as JSON, token by token."""
        return (json.dumps(dict(sorted(self.vocabulary.items())), indent=1) + "\n").encode()


def spell(pieces: Iterable[str]) -> bytes:
    """The bytes of spelled tokens, in UTF-8 as far as they make whole characters."""
    return "".join(pieces).encode(errors="surrogateescape")


def mark(before: bytes, token: bytes, after: bytes) -> tuple[str, str, str]:
    """The three as strings, the one in the middle widened to whole characters."""
    text = before + token + after
    first, end = len(before), len(before) + len(token)
    while 0 < first < len(text) and text[first] & 0xC0 == 0x80:
        first -= 1
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end += 1
    head, middle, tail = (part.decode(errors="replace") for part in (text[:first], text[first:end], text[end:]))
    return head, middle, tail
