"""CPU implementations of the sparse autoencoder operators."""
