"""The study of similarity: what groups of similar tokens have in common."""

import math

import pytest
import torch
from torch import Tensor

from benchmarks.sparsity.similarity import similarity
from gossamer import nn

TOPICS, SIZE = 4, 8


class Model(torch.nn.Module):
    """One block, of whose 32 neurons token t lets through the eight of topic t % 4."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, TOPICS, device=device)
        self.mlp = nn.GatedMLP(TOPICS, TOPICS * SIZE, activation="relu", method="gather", device=device)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.eye(TOPICS).repeat(4, 1))
            self.mlp.gate_proj.weight.copy_(torch.eye(TOPICS).repeat_interleave(SIZE, 0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.mlp(self.embedding(input_ids))


def test_topics_are_put_together(device: torch.device) -> None:
    """Neighbours have all topics, similar tokens one; the time of the block is taken in both orders."""
    ids, done = torch.arange(256, device=device).view(2, 128), []
    model = Model(device)
    report = similarity(model, [ids % 16, (ids + 1) % 16], window=128, progress=lambda *step: done.append(step))
    found = report.layers["mlp"]
    assert done == [(1, 3), (2, 3), (3, 3)] and not report.missed and report.window == 128
    assert (found.tokens, found.mean) == (512, SIZE)
    assert (found.neighbours, found.similar, found.predicted) == (TOPICS * SIZE, SIZE, TOPICS)
    assert found.chance > 3 * SIZE
    assert found.path in ("gather", "dense") and found.seconds_neighbours > 0 and found.measured > 0
    assert str(report).count("\n") == 1 and "4.00x" in str(report) and found.path in str(report)
    # In the right order already, neighbours are as good.
    one = similarity(model, [ids.view(32, 8).t().reshape(2, 128) % 16], window=128, measure=False).layers["mlp"]
    assert one.neighbours == one.similar == SIZE and math.isnan(one.measured) and one.path is None


def test_by_its_definition(device: torch.device) -> None:
    """Unions of random rows, as they are and at best as good, against sets."""
    torch.manual_seed(0)
    mlp = nn.MLP(24, 40, "relu", device=device)
    x = torch.randn(3, 40, 24, device=device)
    found = similarity(mlp, [x], window=64, measure=False).layers[""]
    active = mlp.up_proj(x.flatten(0, 1)[:64]) > 0
    sets = [set(torch.nonzero(row).flatten().tolist()) for row in active]
    assert found.tokens == 64 and found.mean == pytest.approx(sum(map(len, sets)) / 64)
    unions = [len(set.union(*sets[first : first + 32])) for first in (0, 32)]
    assert found.neighbours == sum(unions) / 2
    assert found.mean <= found.similar <= found.neighbours <= 40


def test_masked_tokens_and_windows(device: torch.device) -> None:
    """Padding is in no group; as many windows as were asked for, spread over a batch."""
    ids = torch.zeros(2, 96, dtype=torch.int64, device=device)
    ids[:, 48:] = torch.arange(48, device=device) % 4
    mask = torch.zeros_like(ids)
    mask[:, 48:] = 1
    model = Model(device)
    batch = {"input_ids": ids, "attention_mask": mask}
    found = similarity(model, [batch], window=96, measure=False).layers["mlp"]
    # 24 tokens of each topic make three groups of two topics each.
    assert (found.tokens, found.neighbours, found.similar) == (96, TOPICS * SIZE, 2 * SIZE)
    many = torch.randint(16, (4, 160), device=device)
    for windows, tokens in ((1, 64), (3, 192), (100, 640)):
        assert similarity(model, [many], window=64, windows=windows, measure=False).layers["mlp"].tokens == tokens
    # A block that lets nothing through has nothing in common.
    with torch.no_grad():
        model.mlp.gate_proj.weight.fill_(-1)
    found = similarity(model, [many], window=64, measure=False).layers["mlp"]
    assert (found.mean, found.neighbours, found.similar, found.predicted) == (0, 0, 0, 1)


def test_errors(device: torch.device) -> None:
    model, ids = Model(device), torch.zeros(2, 16, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"a batch must bring 64 tokens to a block, but none did"):
        similarity(model, [ids], window=64)
    with pytest.raises(ValueError, match=r"window must be a multiple of 32, the tokens of a group, got 40"):
        similarity(model, [ids], window=40)
    with pytest.raises(ValueError, match=r"similarity: windows must be at least 1"):
        similarity(model, [ids], windows=0)
    with pytest.raises(ValueError, match=r"similarity: model must have sparse blocks, got none"):
        similarity(torch.nn.Linear(2, 2), [ids])
    assert model.mlp.sparse_block.observer is None
