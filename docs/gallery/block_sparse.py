"""Block-sparse attention: a window of keys in place of all.

Two small transformers learn to predict the next byte of Python's standard library. In one each query meets all bytes
before it. In the other a layout names the blocks of 32 x 32 that exist: a window of the last 64 bytes, and the first
block, which all meet. The cost of attention follows the blocks; the picture shows which they are, and both losses.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from gossamer import blocksparse, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("steps", nargs="?", type=int, default=150, help="training steps, 150 by default")
steps = parser.parse_args().steps
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
T, block = 512, 32
every = blocksparse.causal((T, T), block)
window = blocksparse.sliding_window((T, T), block, (64, 0))
window = window.union(blocksparse.global_tokens((T, T), block, 1)).intersection(every)


class Layer(torch.nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.attention = nn.BlockSparseAttention(64, 4, layout=layout, causal=True, rope_theta=10_000.0)
        self.mlp = nn.GatedMLP(64, 176)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(64) for _ in range(2))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
for number, (name, layout) in enumerate({"all keys": every, "window": window}.items()):
    torch.manual_seed(0)
    ends = torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256)
    model = torch.nn.Sequential(ends[0], Layer(layout), Layer(layout), ends[1])
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(steps):
        starts = torch.randint(len(text) - T - 1, (4, 1))
        batch = text[starts + torch.arange(T + 1)].long()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    blocks = int(layout.nnz)
    axes[number].imshow(layout.to_dense().view(T // block, -1), cmap="Greys")
    axes[number].set(title=f"{name}: {blocks} blocks", xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    axes[2].plot(torch.tensor(losses).cumsum(0) / torch.arange(1, steps + 1), label=name, linewidth=5 - 3 * number)
    print(f"{name}: {blocks} blocks, loss {sum(losses[-20:]) / len(losses[-20:]):.3f}")
axes[2].set(xlabel="step", title="loss, mean so far"), axes[2].legend()
figure.savefig("block_sparse.png", dpi=120)
