"""The parts of ``gossamer demo``: text, model, training, measurements, features, report."""
