"""CPU implementations of the row-sparse operators: the product path on a CPU and the specification of the kernels."""
