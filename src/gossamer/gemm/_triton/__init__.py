"""GPU kernels of `gemm`, in Triton."""
