"""Training: a small transformer whose blocks learn to use few of their neurons.

The program behind `gossamer train` makes tokens of the source of Python's standard library, and trains three
transformers of three layers on them from the same seed. The first has the loss of the next token alone. The second has
an L1 term beside it, which starts small and grows. The third gives new weights to neurons that no token of a step has
made active. The pictures show the loss, the active neurons of each layer, and dead neurons.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

from matplotlib import pyplot as plt

from gossamer import train

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("steps", nargs="?", type=int, default=200, help="training steps, 200 by default")
steps = parser.parse_args().steps
texts = [file.read_text(errors="replace") for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]]
figure, panels = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
with tempfile.TemporaryDirectory() as folder:
    tokenizer = train.learn_tokenizer(texts, 512)
    train.pack(texts, tokenizer, Path(folder) / "corpus")
    corpus = train.Corpus(Path(folder) / "corpus")
    config = train.preset("tiny", layers=3, vocabulary=512, steps=steps)
    sparse = {"l1": 5e-3, "l1_ramp": steps // 4}
    for name, changes in {"no L1": {}, "L1": sparse, "L1, new weights": sparse | {"reinitialize": 0.1}}.items():
        run = train.Run(train.preset("tiny", **{**vars(config), **changes}), corpus, Path(folder) / name)
        run.train()
        losses, dead = ([record[key] for record in run.records] for key in ("loss", "dead"))
        panels[0].plot(losses, label=name, linewidth=1), panels[2].plot(dead, label=name)
        last = run.records[-1]
        print(f"{name}: validation loss {last['validation']:.3f}, {last['l0']:.1f} active neurons")
    for layer in range(config.layers):
        panels[1].plot([record[f"l0/{layer:02}"] for record in run.records], label=f"layer {layer}")
for axes, title in zip(panels, ("loss", "active neurons of 176, L1, new weights", "share of dead neurons")):
    axes.set(xlabel="step", title=title), axes.legend()
panels[1].set_yscale("log")
figure.savefig("train_sparse.png", dpi=120)
