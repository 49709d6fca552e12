"""Other libraries' models with gossamer's operators.

`sae_lens` has `patch(obj)`, undone by `unpatch(obj)`; `transformers` gives the activations of a model that reads text.
"""

__all__: list[str] = []
