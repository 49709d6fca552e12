"""GPU kernels of the row-sparse operators."""
