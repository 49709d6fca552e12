"""Autoencoders: what a layer knows about text, one feature at a time.

A small network learns to predict the next byte of Python's standard library. Then a JumpReLU autoencoder learns to
write the network's 128 hidden numbers as a sum of few out of 1,024 directions. It is told how many a byte should have,
16, and nothing else: L0 starts at several times that and comes down. The last lines print where one feature is largest.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from gossamer import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("steps", nargs="?", type=int, default=1000, help="training steps, 1000 by default")
steps = parser.parse_args().steps
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
torch.manual_seed(0)

layers = torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(256, 256), torch.nn.GELU()
hidden, head = torch.nn.Sequential(*layers, torch.nn.Linear(256, 128)), torch.nn.Linear(128, 256)


def windows(starts):  # the 16 bytes before each byte
    return text[starts[:, None] + torch.arange(16)].long()


optimizer = torch.optim.Adam([*hidden.parameters(), *head.parameters()], lr=2e-3)
for _ in range(steps):
    starts = torch.randint(len(text) - 17, (512,))
    loss = F.cross_entropy(head(F.gelu(hidden(windows(starts)))), text[starts + 16].long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

sae = nn.JumpReLUSAE(d_in=128, d_sae=1024, target_l0=16)
optimizer, l0, explained = torch.optim.Adam(sae.parameters(), lr=1e-3), [], []
for _ in range(steps):
    with torch.no_grad():
        x = hidden(windows(torch.randint(len(text) - 17, (1024,))))
    loss = sae.loss(x)
    optimizer.zero_grad()
    loss.loss.backward()
    optimizer.step()
    l0.append(loss.l0.item())
    explained.append(1 - (loss.mse / (sae.input_scale * x).var(0).sum()).item())

with torch.no_grad():
    latents = sae.eval().encode(hidden(windows(places := torch.randint(len(text) - 17, (50_000,))))).to_dense()
feature = ((latents > 0).float().mean(0) - 0.01).abs().argmin().item()
for place in places[latents[:, feature].topk(5).indices]:
    print(feature, bytes(text[place : place + 16]))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.semilogy(l0), left.axhline(16, color="grey", linestyle="dotted"), left.minorticks_off()
left.set_yticks([16, 32, 64, 128], [16, 32, 64, 128]), left.set(xlabel="step", title="features a byte (L0), target 16")
right.plot(explained), right.set(xlabel="step", title="variance explained", ylim=(0.5, 1))
figure.savefig("autoencoders.png", dpi=120)
