"""Numbers that both backends store for a score, and the rules that adapt k."""

LEVELS = 31741
"""Steps between 0 and the sum of a query's gates. With 0 for an unseen key, and two more for NaN and always-kept keys,
the integers are, as bit patterns, the float16 numbers from 0 to infinity."""

RULES = ("variance", "entropy", "learned")
"""Names of the rules of `AdaptiveK`; kernels number them in this order."""

LONG_ROW = 32768
"""Scores of a query beyond which a GPU lists those that may be among the highest."""

CLOSED = 1e-34
"""A query whose weights, or gates, have a sum of magnitudes below this one scores 0 everywhere."""

ZERO = 15871
"""The key of a score of 0 where the activation is "relu". A score x below or above it, divided by the sum of the
weights' magnitudes, has the key of the upper bits of |x| + TINY, as a float32: 512 keys an octave."""
TINY = 2.0**-9
FIRST_BITS, STEP_BITS = 0x3B000000 - (1 << 13), 14
"""The bits of TINY less half a step, which rounds, and the lower bits that are shifted away."""

GROWTH = 16
"""Entries by which a list of candidates grows at most before its room is looked at: with less of it a list is full."""
