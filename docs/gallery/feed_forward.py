"""Feed-forward blocks: a penalty that empties them, and products that skip what is empty.

Two networks learn to predict the next byte of Python's standard library from the 16 before it. Both have a ReLU block
of 1,024 neurons. One of them also pays for each neuron that is active. The picture shows the share of active neurons
and the loss of both. At the end the sparse block reads the weights of its active neurons alone; the result is the same.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from gossamer import nn

steps = int(sys.argv[1]) if sys.argv[1:] else 600
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.RMSNorm(128)
        self.read, self.block = torch.nn.Sequential(*layers), nn.MLP(128, 1024, "relu", method="gather")
        self.head = torch.nn.Linear(128, 256)

    def forward(self, windows):
        x = self.read(windows)
        active = F.relu(self.block.up_proj(x))
        return self.head(x + self.block.down_proj(active)), active


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for penalty in (0.0, 1.0):
    torch.manual_seed(0)
    network, losses, shares = Network(), [], []
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - 17, (512,))
        logits, active = network(text[starts[:, None] + torch.arange(16)].long())
        loss = F.cross_entropy(logits, text[starts + 16].long())
        optimizer.zero_grad()
        (loss + penalty * active.mean()).backward()
        optimizer.step()
        losses.append(loss.item()), shares.append((active > 0).float().mean().item())
    left.semilogy(shares, label=f"penalty {penalty:g}")
    right.plot(torch.tensor(losses).cumsum(0) / torch.arange(1, steps + 1))
left.set(yticks=(ticks := [0.05, 0.1, 0.2, 0.5]), yticklabels=[f"{tick:.0%}" for tick in ticks]), left.minorticks_off()
left.set(xlabel="step", title="share of active neurons"), left.legend()
right.set(xlabel="step", title="loss, mean so far")
figure.savefig("feed_forward.png", dpi=120)

with torch.no_grad():
    x = network.read(text[: 16 * 64].view(64, 16).long())
    dense = network.block.down_proj(F.relu(network.block.up_proj(x)))
    torch.testing.assert_close(network.block(x), dense, rtol=1e-4, atol=1e-5)
    print(f"{shares[-1]:.1%} of the neurons are active; the way: {network.block.last_path}")
