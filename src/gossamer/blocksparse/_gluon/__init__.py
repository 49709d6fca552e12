"""Hopper kernels of the block-sparse operators, in Gluon."""
