"""GPU kernels of `attention` for Hopper, in Gluon."""
