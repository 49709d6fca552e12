"""`integrations.transformers.patch` in use: `model.generate`, prefill and single blocks, eager, in bfloat16.

    python -m benchmarks.integrations.generate [--model NAME ...] [--tokens 24] [--rounds 5]
    python -m benchmarks.integrations.generate --graphs      # a static cache, torch.compile(mode="reduce-overhead")

Models have the sizes of their names, few layers and random weights. A ReLU model gets a bias with which a layer lets
29 of 5,632 neurons through. Plain and patched copies of one model take turns; with OUT set, medians go to
OUT/generate.json.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.special import ndtri

from benchmarks.tune import DEVICE, Results
from gossamer.integrations.transformers import patch

CUDA = DEVICE.type == "cuda"
ACTIVE = 29 / 5632
SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2048/5632 relu": ("Llama", {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12}),
    "llama 4096/14336 silu": ("Llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8}),
    "llama 4096/14336 relu": ("Llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8}),
    "qwen3 2048/6144 silu": ("Qwen3", {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12}),
    "gemma2 2304/9216 gelu": ("Gemma2", {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 12}),
    "opt 2048/8192 relu": ("OPT", {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 12}),
}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


def make(name: str) -> nn.Module:
    """A model with random weights, sparse where its activation is a ReLU."""
    import transformers

    kind, sizes = SIZES[name]
    options: dict[str, Any] = {**sizes, **(SMALL if not CUDA else {}), "vocab_size": 32000, **HEADS}
    if kind == "OPT":
        options |= {"word_embed_proj_dim": options["hidden_size"], "activation_function": "relu"}
        options["ffn_dim"] = options.pop("intermediate_size", options["ffn_dim"])
    elif kind == "Llama":
        options |= {"hidden_act": name.split()[-1], "mlp_bias": True}
    config = getattr(transformers, f"{kind}Config")(**options, pad_token_id=0, eos_token_id=None, bos_token_id=1)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    if name.endswith("relu"):
        for module in model.modules():
            layer = getattr(module, "gate_proj", None) or getattr(module, "fc1", None)
            if layer is not None:
                # Rows are normed: z has this deviation.
                deviation = layer.weight.float().norm(dim=1).mean()
                layer.bias.data.fill_(float(ndtri(torch.tensor(ACTIVE)) * deviation))
    return model


def seconds(call: Callable[[], Any]) -> float:
    _synchronize()
    begin = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - begin


def turns(calls: dict[str, Callable[[], Any]], rounds: int, scale: float) -> dict[str, float]:
    """The median of each, taken in turns, in units of `scale` seconds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            found[name].append(seconds(call) / scale)
        if not turn:  # the first turn compiles
            first = {f"{name}, first": value[0] for name, value in found.items()}
            found = {name: [] for name in calls}
    return {**{name: median(value) for name, value in found.items()}, **first}


def _synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _generate(model: Any, ids: Tensor, tokens: int, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        return model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, **options)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=SIZES, help="repeatable; all by default")
    parser.add_argument("--batch", action="append", type=int, help="of generate; repeatable, 1 and 8 by default")
    parser.add_argument("--tokens", type=int, default=24, help="new ones of a call of generate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--graphs", action="store_true", help="generate with a static cache, compiled")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results, tokens = Results(__file__), options.tokens if CUDA else 4
    for name in options.model or SIZES:
        plain = make(name)
        patched = copy.deepcopy(plain)
        report = patch(patched, sparse=name.endswith("relu"))
        print(f"\n== {name}\n{report}", flush=True)
        models = {"plain": plain, "patched": patched}
        with torch.no_grad():
            for batch in options.batch or (1, 8):
                ids = torch.randint(2, 32000, (batch, 8), device=DEVICE)
                extra = {"cache_implementation": "static"} if options.graphs else {}
                if options.graphs:
                    for model in models.values():
                        model.forward = torch.compile(type(model).forward, mode="reduce-overhead").__get__(model)
                calls = {kind: _generate(model, ids, tokens, **extra) for kind, model in models.items()}
                _row(results, f"{name}, generate, batch {batch}, ms a token", calls, options.rounds, 1e-3 * tokens)
            if not options.graphs:
                ids = torch.randint(2, 32000, (8, 2048) if CUDA else (2, 32), device=DEVICE)
                calls = {kind: (lambda model=model: model(ids, logits_to_keep=1)) for kind, model in models.items()}
                if not name.startswith("opt"):
                    _row(results, f"{name}, prefill {list(ids.shape)}, ms", calls, options.rounds, 1e-3)
                    _blocks(results, name, models, options.rounds)
        for kind, model in models.items():
            paths = {p for m in model.modules() if (p := getattr(m, "last_path", None)) or (p := _path(m))}
            print(f"  {kind}: last paths {sorted(paths)}", flush=True)
        del plain, patched, models, calls
    results.keep()


def _path(module: Any) -> str | None:
    block = module.__dict__.get("sparse_block")
    return None if block is None else block.last_path


def _row(results: Results, label: str, calls: dict[str, Callable[[], Any]], rounds: int, scale: float) -> None:
    row = turns(calls, rounds, scale)
    results.found[label] = row
    ratio = row["patched"] / row["plain"]
    print(f"{label}: {', '.join(f'{k} {v:.3f}' for k, v in row.items())}; patched / plain {ratio:.3f}", flush=True)


def _blocks(results: Results, name: str, models: dict[str, Any], rounds: int) -> None:
    blocks = {kind: model.model.layers[0].mlp for kind, model in models.items()}
    size = blocks["plain"].down_proj.weight.shape[0]
    for rows in (1, 8, 64, 200, 1024):
        x = torch.randn(rows, size, device=DEVICE, dtype=torch.bfloat16)

        def repeat(block: Any, x: Tensor = x) -> Callable[[], None]:
            def call() -> None:
                for _ in range(50):
                    block(x)

            return call

        calls = {kind: repeat(block) for kind, block in blocks.items()}
        _row(results, f"{name}, block of {rows} tokens, us", calls, rounds, 50e-6)


if __name__ == "__main__":
    main()
