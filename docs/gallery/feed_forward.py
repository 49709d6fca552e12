"""Feed-forward blocks: L1 in the loss leaves few neurons active, and the block computes these alone.

Three networks learn to predict the next byte of Python's standard library from the 16 before it. All have a ReLU block
of 1,024 neurons. Two of them pay for active neurons, by the L1 of the block; one of these gives new weights to neurons
that no byte of a step has made active. The pictures show active neurons, dead ones, and the loss.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch.nn import functional as F

from gossamer import nn, sparsity

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("steps", nargs="?", type=int, default=600, help="training steps, 600 by default")
steps = parser.parse_args().steps
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(256, 128), torch.nn.RMSNorm(128)
        self.read, self.block = torch.nn.Sequential(*layers), nn.MLP(128, 1024, "relu", method="gather", l1=True)
        self.head = torch.nn.Linear(128, 256)

    def forward(self, windows):
        out, activity = self.block(x := self.read(windows))
        return self.head(x + out), activity


figure, panels = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for coefficient, rate in ((0.0, 0.0), (1e-3, 0.0), (1e-3, 0.1)):
    torch.manual_seed(0)
    network, course, tracker = Network(), [], sparsity.DeadNeuronTracker()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - 17, (512,))
        logits, activity = network(text[starts[:, None] + torch.arange(16)].long())
        loss = F.cross_entropy(logits, text[starts + 16].long())
        optimizer.zero_grad()
        (loss + coefficient * activity.l1).backward()
        optimizer.step()
        tracker.add(activity.fired)
        sparsity.reinitialize_(network.block.up_proj.weight, dead := tracker.step(), rate=rate)
        course.append((activity.l0.item(), dead.float().mean().item(), loss.item()))
    l0, dead, losses = torch.tensor(course).T
    for axes, values in zip(panels, (l0, dead, losses.cumsum(0) / torch.arange(1, steps + 1))):
        axes.plot(values, label=f"L1 {coefficient:g}" + (", new weights" if rate else ""))
for axes, title in zip(panels, ("active neurons of 1,024", "share of dead neurons", "loss, mean so far")):
    axes.set(xlabel="step", title=title)
panels[0].set_yscale("log"), panels[1].legend()
figure.savefig("feed_forward.png", dpi=120)
