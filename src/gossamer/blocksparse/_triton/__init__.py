"""GPU kernels of the block-sparse operators."""
