"""Small tasks that need a distant token: a layer that selects 8 keys does as well as one that attends to all."""

import pytest
import torch
from torch import Tensor

from demo.needle import KEYS, VOCABULARY, NeedleModel, Task, accuracy, needle, train_needle
from demo.train import Clock


def copying(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """20 tokens, a sign, and the same tokens again: each of them is told from those before it."""
    word = torch.randint(VOCABULARY, (batch, 20), generator=generator)
    tokens = torch.cat([word, torch.full((batch, 1), VOCABULARY), word[:, :-1]], 1)
    answers = torch.full_like(tokens, -100)
    answers[:, 20:] = word
    return tokens, answers


@pytest.mark.native
@pytest.mark.full
@pytest.mark.parametrize("task, steps", [(needle, 250), (copying, 800)], ids=["needle", "copy"])
def test_as_good_as_dense(task: Task, steps: int) -> None:
    """Trained densely, then with its indexers, and then a little with what they select."""
    torch.manual_seed(0)
    model = NeedleModel()
    train_needle(model, task, Clock(0, steps), torch.Generator().manual_seed(0), lambda done, state: None)
    whole = accuracy(model.attend(None), task)
    assert whole > 0.95
    assert accuracy(model.attend(KEYS), task) >= whole - 0.01
