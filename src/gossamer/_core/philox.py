"""The dropout of `dropout` in kernels. Only kernel files import this module, which needs Triton."""

import triton
import triton.language as tl

from gossamer._core.dropout import ROUNDS

_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def dropout_weights(seed_ptr, pair, query, key, drop):
    """The factors of probabilities of a head, counted over batches, of queries and keys that broadcast: 0, or
    1 / (1 - p) of those that are kept."""
    seed = tl.load(seed_ptr)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a, b = tl.full([], 0xD2511F53, tl.uint32), tl.full([], 0xCD9E8D57, tl.uint32)
    c0, c1 = (key + query * 0).to(tl.uint32), (query + key * 0).to(tl.uint32)
    c2, c3 = c0 * 0 + pair.to(tl.uint32), c0 * 0
    for _ in tl.static_range(_ROUNDS):
        before = c0
        c0, c1 = tl.umulhi(b + c2 * 0, c2) ^ c1 ^ k0, b * c2
        c2, c3 = tl.umulhi(a + before * 0, before) ^ c3 ^ k1, a * before
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    # The difference of integers keeps the digits that 1 - p would lose.
    kept = (c0 >> 1).to(tl.int32) >= drop
    return tl.where(kept, 2147483648.0 / (2147483647 - drop + 1.0), 0.0)
