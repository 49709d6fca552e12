"""GPU kernels of `gemm` for Hopper, in Gluon."""
