"""Training of sparse transformers: text to tokens, the paper's model, its recipe, and checkpoints.

`gossamer train` is its command. The same from Python:

>>> config = preset("tiny", l1=1e-3, reinitialize=0.1)
>>> Run(config, Corpus(folder / "corpus"), folder / "run").train()  # doctest: +SKIP
"""

from gossamer.train.config import PRESETS, Config, preset
from gossamer.train.data import Corpus, learn_tokenizer, pack, read_dataset, read_text
from gossamer.train.loop import Run, learning_rate
from gossamer.train.model import Transformer, save_pretrained
from gossamer.train.sae import SAEConfig, SAERun, evaluate_sae

__all__ = [
    "PRESETS",
    "Config",
    "Corpus",
    "Run",
    "SAEConfig",
    "SAERun",
    "Transformer",
    "evaluate_sae",
    "learn_tokenizer",
    "learning_rate",
    "pack",
    "preset",
    "read_dataset",
    "read_text",
    "save_pretrained",
]
