"""The benchmark framework: cases from `benchmarks/`, checked, timed beside their peers, and reported."""

from gossamer.cli.bench.case import Case, Provider, copies, random_matrix, random_rows, relative_error

__all__ = ["Case", "Provider", "copies", "random_matrix", "random_rows", "relative_error"]
