"""GPU kernels of `blocksparse` for Hopper, in Gluon."""
