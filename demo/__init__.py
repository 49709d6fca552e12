"""The demo (`python -m demo`): text, model, training, measurements, features, report."""
