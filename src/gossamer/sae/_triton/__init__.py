"""GPU kernels of the sparse autoencoder operators."""
