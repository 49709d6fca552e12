"""Gated blocks: the same training, with less kept in memory.

A block `down(silu(gate(x)) * up(x))` learns to predict the next byte of Python's standard library from the 16 before
it: once as three layers of PyTorch, once as `nn.GatedMLP`, and once as one that keeps nothing and computes gate and up
again. The losses agree. The picture shows the tensors that each keeps for its backward pass, beside x and weights.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from gossamer import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("steps", nargs="?", type=int, default=200, help="training steps, 200 by default")
steps = parser.parse_args().steps
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def three_layers(block, x):
    return block.down_proj(F.silu(block.gate_proj(x)) * block.up_proj(x))


def kept(block, call, x):  # bytes that a forward pass keeps, each tensor once
    known = {t.data_ptr() for t in (x, *block.parameters())}
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        call(block, x)
    return sum({t.data_ptr(): t.nbytes for t in found if t.data_ptr() not in known}.values())


ways = {"three layers": (three_layers, False), "nn.GatedMLP": (nn.GatedMLP.__call__, False)}
ways["nn.GatedMLP(recompute=True)"] = nn.GatedMLP.__call__, True
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for (name, (call, recompute)), width in zip(ways.items(), (6, 3, 1)):
    torch.manual_seed(0)
    block, embedding = nn.GatedMLP(256, 704, recompute=recompute), torch.nn.Embedding(256, 16)
    optimizer, losses = torch.optim.Adam([*block.parameters(), *embedding.parameters()], lr=2e-3), []
    for _ in range(steps):
        starts = torch.randint(len(text) - 17, (256,))
        x = embedding(text[starts[:, None] + torch.arange(16)].long()).flatten(1)
        loss = F.cross_entropy(call(block, x), text[starts + 16].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tokens = [256, 512, 1024, 2048, 4096]
    inputs = [embedding(text[: 16 * n].view(n, 16).long()).flatten(1).detach().requires_grad_() for n in tokens]
    left.plot(losses, label=name, linewidth=width)
    right.plot(tokens, [kept(block, call, x) / 2**20 for x in inputs], "o-", label=name)
    print(f"{name}: loss {losses[-1]:.4f}")
left.set(xlabel="step", title="loss: three lines, one on the other"), left.legend()
right.set(xlabel="tokens", title="MiB kept for the backward pass")
figure.savefig("gated_mlp.png", dpi=120)
