"""Gated sparse attention: an indexer that learns which keys matter.

A layer reads passages of Python's standard library that come twice, and learns to predict the second time's bytes with
attention to all keys. Its indexer learns beside it, by a loss of its own, to score keys as attention weighs them. Then
each of 256 queries may take 16 keys alone. The bars are shares of bytes told right, from bytes 128 places before.
"""

import argparse
import copy
import sysconfig
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from gossamer import nn
from gossamer.attention import Selection, indexer_loss

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("steps", nargs="?", type=int, default=600, help="training steps, 600 by default")
steps = parser.parse_args().steps
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
T, k = 256, 16
torch.manual_seed(0)
embedding, norm, head = torch.nn.Embedding(256, 64), torch.nn.RMSNorm(64), torch.nn.Linear(64, 256)
conv, layer = torch.nn.Conv1d(64, 64, 4, padding=3), nn.GatedSparseAttention(64, 4, k_base=k, k_min=4, k_max=64)
untrained = copy.deepcopy(layer.indexer)
parameters = torch.nn.ModuleList([embedding, norm, head, conv, layer]).parameters()
optimizer, losses, learned = torch.optim.Adam(parameters, lr=3e-3), [], []


def read(starts):  # passages, and the last four bytes of each position
    batch = text[starts + torch.arange(T + 1) % (T // 2)].long()
    return batch, norm(embedding(batch[:, :-1]) + conv(embedding(batch[:, :-1]).mT)[..., :T].mT)


def guess(batch, x, selection=None):  # of the second time: loss, and the share that is right
    logits, wanted = head(x + layer(x, selection=selection))[:, -T // 2 :], batch[:, -T // 2 :]
    return F.cross_entropy(logits.mT, wanted), (logits.argmax(-1) == wanted).float().mean().item()


for _ in range(steps):
    layer.dense, (batch, x) = True, read(torch.randint(len(text) // 2, (4, 1)))
    q, key, _, _, index = layer.project(x.detach())
    loss, of_indexer = guess(batch, x)[0], indexer_loss(q, key, *index, layer.indexer.idx_bias, causal=True)
    optimizer.zero_grad()
    (loss + of_indexer).backward()
    optimizer.step()
    losses.append(loss.item()), learned.append(of_indexer.item())
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(losses, label="next byte"), left.plot(learned, label="indexer"), left.legend()
near = Selection.from_mask(torch.ones(T, T).tril().triu(1 - k).bool().expand(32, T, T))
with torch.no_grad():
    batch, x = read(len(text) // 2 + torch.arange(32)[:, None] * 4096)
    found, layer.dense = {"all keys": guess(batch, x), f"the last {k}": guess(batch, x, near)}, False
    found[f"the indexer's {k}"], layer.indexer = guess(batch, x), untrained
    found[f"an untrained one's {k}"] = guess(batch, x)
right.bar_label(right.barh(list(found), [share for _, share in found.values()]), fmt="{:.0%}")
right.set(title="bytes told right, unseen passages", xlim=(0, 1.15), xticks=[]), left.set(xlabel="step", title="loss")
figure.savefig("gated_attention.png", dpi=120)
