"""CPU implementations of the block-sparse operators."""
