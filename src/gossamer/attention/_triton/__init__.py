"""GPU kernels of the attention operators."""
