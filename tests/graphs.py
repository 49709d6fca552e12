"""Calls in a CUDA graph, replayed on other inputs, beside the same calls made eagerly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of call, and the results that each replay of the graph overwrites."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    # Kernels compile, and libraries make their handles, before anything is captured.
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def follows(call: Callable[[], Sequence[Tensor | None]], *inputs: Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    """A graph of `call`, which reads `inputs`, gives the results of `call` on other inputs, and on the first ones."""
    graph, results = captured(call)
    for _ in range(2):
        with torch.no_grad():
            for x in inputs:
                x.copy_(x.flatten().flip(0).view_as(x))
        graph.replay()
        for got, want in zip(results, call(), strict=True):
            torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)
