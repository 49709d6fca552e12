"""CPU implementations of `gemm`, in PyTorch."""
