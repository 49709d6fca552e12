"""What both backends store for a score, and how they adapt k."""

LEVELS = 31741
"""Steps between 0 and the sum of a query's gates. With one key below (not seen) and those of NaN and of always-kept keys
above, the integers are the float16 numbers from 0 to infinity."""

RULES = ("variance", "entropy", "learned")
