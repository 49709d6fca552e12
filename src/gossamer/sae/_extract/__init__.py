"""The parts of `sae.extract`: where rows come from, where they go, and what is kept of every latent."""
