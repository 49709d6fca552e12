"""Variants of a gated block's forward and backward pass on Hopper beside each other and Liger's, for tuning.

Usage: python benchmarks/gemm/tune_gated_mlp.py [M,K,N ...]. Each candidate runs for a good half second at a time, as
training does: a GPU then holds its power limit. Then one pass of each, kernel by kernel. Figures to publish come from
`gossamer bench gemm`. Set OUT to a folder to keep the numbers as JSON.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gossamer import gemm
from gossamer._core import tuning

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gemm.tune_linear_glu import keep, replaced, sustained

SHAPES = [(1024, 4096, 14336), (4096, 4096, 14336), (16384, 4096, 14336), (4096, 2048, 5632), (4096, 3072, 8192)]


def candidates(m: int, k: int, n: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", generator=generator)  # noqa: E731
    x, grad = draw(m, k).bfloat16().requires_grad_(), draw(m, k).bfloat16()
    gate, up = ((draw(n, k) / k**0.5).bfloat16().requires_grad_() for _ in range(2))
    down = (draw(k, n) / n**0.5).bfloat16().requires_grad_()

    def step(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (x, gate, up, down), grad)

    def ours(beside: bool) -> tuple[Tensor, ...]:
        with replaced((tuning, "gates_beside", lambda d: beside)):
            return step(gemm.gated_mlp(x, gate, up, down))

    found: dict[str, Callable[[], Any]] = {
        "gates beside": lambda: ours(True),
        "gates after": lambda: ours(False),
    }
    found["forward alone"] = lambda: gemm.gated_mlp(x, gate, up, down)
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        liger = lambda: LigerSiLUMulFunction.apply(x @ gate.t(), x @ up.t()) @ down.t()  # noqa: E731
        found |= {"Liger": lambda: step(liger()), "Liger, forward alone": liger}
    except ImportError:
        print("liger-kernel is not installed")
    return found


def kernels(call: Callable[[], Any]) -> list[tuple[float, str]]:
    """(microseconds, name) of each kernel of a call, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in seen.events() if event.device_type.name == "CUDA"), key=lambda e: e.time_range.start
    )
    return [(event.time_range.elapsed_us(), event.name) for event in events]


def main() -> None:
    shapes = [tuple(map(int, argument.split(","))) for argument in sys.argv[1:]] or SHAPES
    results: dict[str, Any] = {}
    for shape in shapes:
        calls = candidates(*shape)  # type: ignore[arg-type]
        found = sustained(calls)
        results[str(shape)] = {"milliseconds": found, "kernels": {name: kernels(calls[name]) for name in calls}}
        print(f"\n{shape}")
        for name, ms in sorted(found.items(), key=lambda item: item[1]):
            print(f"  {name:28s} {ms:9.3f} ms", flush=True)
    for shape, result in results.items():
        print(f"\n{shape}, microseconds")
        for name, events in result["kernels"].items():
            print(f"  {name}: " + ", ".join(f"{us:.0f} {kernel[:32]}" for us, kernel in events))
    keep("tune_gated_mlp", {"results": results})


if __name__ == "__main__":
    main()
