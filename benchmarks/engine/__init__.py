"""The benchmark framework: cases from `benchmarks/`, checked, timed beside their peers, and reported."""

from benchmarks.engine.case import (
    Case,
    Provider,
    copies,
    error_beside_mean,
    random_matrix,
    random_rows,
    relative_error,
)
from benchmarks.engine.random_cases import beside_dense, log_uniform

__all__ = [
    "Case",
    "Provider",
    "beside_dense",
    "copies",
    "error_beside_mean",
    "log_uniform",
    "random_matrix",
    "random_rows",
    "relative_error",
]
