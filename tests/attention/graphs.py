"""Calls in a CUDA graph, replayed on other inputs, beside the same calls made eagerly."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def check_replays(
    call: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    """`call` reads `inputs`, whose numbers are drawn anew for each of two replays."""
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
    for _ in range(2):
        with torch.no_grad():
            for x in inputs:
                x.copy_(torch.randn_like(x))
        graph.replay()
        got = [x.clone() for x in results]
        for a, b in zip(got, call(), strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
