"""CPU implementations of the attention operators: the product path on a CPU and the specification of the kernels."""
