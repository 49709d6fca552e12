"""Other libraries' models with gossamer's operators.

`sae_lens` has `patch(obj)`, undone by `unpatch(obj)`. `transformers` has the same for models of Hugging Face, and gives
the activations of a model that reads text.
"""

from gossamer._modules import on_demand

__all__: list[str] = []

# A library's module is imported when it is first asked for.
__getattr__, __dir__ = on_demand(globals())
