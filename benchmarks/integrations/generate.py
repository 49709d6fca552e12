"""`integrations.transformers.patch` in use: decoding, prefill and single blocks, in bfloat16.

    python -m benchmarks.integrations.generate [--model NAME ...] [--batch 1] [--tokens 12] [--rounds 9] [--decoding]
    python -m benchmarks.integrations.generate --graphs [--columns]  # CUDA graphs of a block and of a model's step
    python -m benchmarks.integrations.generate --compile    # generate with a static cache and torch.compile

Models have the sizes of their names, few layers and random weights. A ReLU model gets a bias with which a layer lets
29 of 5,632 neurons through. The plain and the patched model, and a copy of the plain one, take turns run by run, so
that a busy host slows all three; ratios are medians over such turns, and the copy's ratio is the noise. Beside the
time until the result stands the time that the calling thread has worked, and with --counts a token's calls of Python's
and C's functions and its launches, which no other work on the host changes. Prefill and single blocks are those of
Llama models. With OUT set, medians go to OUT/generate.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.special import ndtri

from benchmarks.tune import DEVICE, Results, replayed
from gossamer.integrations.transformers import patch

CUDA = DEVICE.type == "cuda"
ACTIVE = 29 / 5632
Times = tuple[list[float], list[float]]
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


def by_columns(model: nn.Module) -> None:
    """The weight of each down projection gets contiguous rows of its transpose: values, shape and name stay."""
    for name, module in model.named_modules():
        if name.endswith((".down_proj", ".fc2")):
            module.weight.data = module.weight.data.t().contiguous().t()


def _synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """The seconds until the result of a call, and those that the calling thread has worked."""
    _synchronize()
    begin, worked = time.perf_counter(), time.thread_time()
    call()
    worked = time.thread_time() - worked
    _synchronize()
    return time.perf_counter() - begin, worked


def turns(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float = 8) -> dict[str, Times]:
    """The times of each call, one after the other in each round, after one round that is not counted. At least three
    rounds, and none after `seconds`. Each round begins with another call."""
    found: dict[str, Times] = {name: ([], []) for name in calls}
    end = time.perf_counter() + seconds
    names = list(calls)
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times = timed(calls[name])
            if turn:
                for kept, value in zip(found[name], times):
                    kept.append(value)
        if turn >= 3 and time.perf_counter() > end:
            break
    return found


def functions(call: Callable[[], Any]) -> tuple[int, int]:
    """The calls of functions of Python and of C that a call makes."""
    counts = Counter[str]()
    sys.setprofile(lambda frame, event, arg: counts.update((event,)))
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"] - 1


def launches(call: Callable[[], Any]) -> tuple[int, float]:
    """The kernels, copies and fills that a call gives to the device, and the milliseconds that these take there."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        _synchronize()
    events: Any = profile.profiler.kineto_results.events()
    found = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    found = [event for event in found if not event.name().startswith("gossamer::")]
    return len(found), sum(event.duration_ns() for event in found) / 1e6


def counted(results: Results, label: str, calls: dict[str, Callable[[], Any]]) -> None:
    """The counts of a token, the least of three."""
    row: dict[str, float] = {}
    for name, call in calls.items():
        call()
        made = [functions(call) for _ in range(3)]
        row[f"{name}, functions of Python"], row[f"{name}, of C"] = map(min, zip(*made))
        if CUDA:
            row[f"{name}, launches"], row[f"{name}, ms on the device"] = map(
                min, zip(*(launches(call) for _ in range(3)))
            )
    results.found[label] = row
    print(f"{label}: {', '.join(f'{name} {value:.4g}' for name, value in row.items())}", flush=True)


def steps(model: Any, ids: Tensor) -> Iterator[None]:
    """Decodes as `generate` does, greedily and with a growing cache: one token each."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    while True:
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1:].argmax(-1)
        yield


def decoding(results: Results, name: str, models: dict[str, Any], ids: Tensor, options: Any) -> None:
    """Tokens of the models, which take turns run by run; the first run of each is not counted. A run's time is the
    median of its tokens."""
    # A collection of the many objects that transformers makes takes longer than tokens.
    gc.collect()
    gc.freeze()
    runs: dict[str, Times] = {kind: ([], []) for kind in models}
    tokens: dict[str, list[float]] = {kind: [] for kind in models}
    kinds, end = list(models), time.perf_counter() + options.seconds
    for turn in range(options.rounds + 1):
        for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
            made = steps(models[kind], ids)
            next(made)  # the prompt
            found = [*zip(*(timed(partial(next, made)) for _ in range(options.tokens)))]
            if turn:
                for kept, times in zip(runs[kind], found):
                    kept.append(median(times))
                tokens[kind] += found[1]
        if turn >= 3 and time.perf_counter() > end:
            break
    name = f"{name}, decoding, batch {len(ids)}"
    report(results, f"{name}, ms a token", runs, 1e-3)
    # A busy host slows most tokens, and the same share of each model's.
    quiet = {kind: sorted(times)[len(times) // 10] for kind, times in tokens.items()}
    results.note(
        f"{name}, ms a token", **{f"{kind} / plain, quiet": quiet[kind] / quiet["plain"] for kind in kinds[1:]}
    )
    if options.counts:
        calls = {kind: partial(next, steps(model, ids)) for kind, model in models.items()}
        counted(results, f"{name}, counts of a token", calls)


def report(results: Results, label: str, found: dict[str, Times], scale: float) -> None:
    """Medians in units of `scale` seconds, and medians of the ratios to the plain model's call of the same turn."""
    row = {name: median(times) / scale for name, (times, _) in found.items()}
    row |= {f"{name}, host": median(worked) / scale for name, (_, worked) in found.items()}
    for what, of in (("", 0), (", host", 1)):
        for name, both in found.items():
            if name != "plain":
                pairs = zip(found["plain"][of], both[of], strict=True)
                row[f"{name} / plain{what}"] = median(b / a for a, b in pairs)
    results.found[label] = row
    print(f"{label}: {', '.join(f'{name} {value:.4g}' for name, value in row.items())}", flush=True)


def eager(results: Results, name: str, models: dict[str, Any], options: Any) -> None:
    for batch in options.batch or [1, 8]:
        decoding(results, name, models, torch.randint(2, 32000, (batch, 8), device=DEVICE), options)
    if not name.startswith("llama") or options.decoding:
        return
    ids = torch.randint(2, 32000, (8, 2048) if CUDA else (2, 32), device=DEVICE)
    calls = {kind: (lambda model=model: model(ids, logits_to_keep=1)) for kind, model in models.items()}
    for _ in range(6 if CUDA else 1):
        models["patched"](ids, logits_to_keep=1)
    report(results, f"{name}, prefill {list(ids.shape)}, ms", turns(calls, 5 if CUDA else 1), 1e-3)
    size = models["plain"].model.layers[0].mlp.down_proj.weight.shape[0]
    for rows in options.rows or (1, 8, 64, 200, 1024):
        # Rows are normed, as a layer's are.
        x = torch.randn(1, rows, size, device=DEVICE, dtype=torch.bfloat16)

        def repeat(model: Any, x: Tensor = x) -> Callable[[], None]:
            block = model.model.layers[0].mlp
            for _ in range(40):
                block(x)

            def call() -> None:
                for _ in range(8):
                    block(x)

            return call

        calls = {kind: repeat(model) for kind, model in models.items()}
        report(results, f"{name}, block of {rows} tokens, us", turns(calls, 60 if CUDA else 1), 8e-6)


def graphs(results: Results, name: str, models: dict[str, Any], batches: list[int]) -> None:
    """The blocks of all layers in turn, so that no cache holds their weights, and a step of decoding, as graphs."""
    from transformers import StaticCache

    size = models["plain"].model.layers[0].mlp.down_proj.weight.shape[0]
    for batch in batches:
        x = torch.randn(batch, 1, size, device=DEVICE, dtype=torch.bfloat16)

        def blocks(model: Any, x: Tensor = x) -> Callable[[], None]:
            def call() -> None:
                for layer in model.model.layers:
                    layer.mlp(x)

            return call

        def step(model: Any, batch: int = batch) -> Callable[[], None]:
            cache = StaticCache(config=model.config, max_cache_len=256)
            ids = torch.randint(2, 32000, (batch, 1), device=DEVICE)
            position = torch.tensor([200], device=DEVICE)
            mask = torch.ones(batch, 1, 1, 256, dtype=torch.bool, device=DEVICE)

            def call() -> None:
                model(ids, attention_mask=mask, past_key_values=cache, position_ids=position[None])

            for _ in range(6):
                call()
            return call

        for what, make_call in (("a block", blocks), ("a step", step)):
            row = replayed({kind: make_call(model) for kind, model in models.items()}, 15, 2)
            layers = len(models["plain"].model.layers) if what == "a block" else 1
            row = {kind: us / layers for kind, us in row.items()}
            results.add(f"{name}, {what} of batch {batch}, CUDA graph", row, against="plain")


def compiled(results: Results, name: str, models: dict[str, Any], batches: list[int], tokens: int) -> None:
    for model in models.values():
        model.forward = torch.compile(type(model).forward, mode="reduce-overhead").__get__(model)
    for batch in batches:
        ids = torch.randint(2, 32000, (batch, 8), device=DEVICE)
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        options["cache_implementation"] = "static"
        calls = {kind: (lambda model=model: model.generate(ids, **options)) for kind, model in models.items()}
        turns(calls, 2)
        report(results, f"{name}, compiled generate, batch {batch}, ms a token", turns(calls, 7), 1e-3 * tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=SIZES, help="repeatable; all by default")
    parser.add_argument("--batch", action="append", type=int, help="repeatable; 1 and 8 by default, and with graphs 16")
    parser.add_argument("--tokens", type=int, default=12, help="tokens of a run")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each model")
    parser.add_argument("--seconds", type=float, default=8, help="no further turns of a measurement after so many")
    parser.add_argument("--decoding", action="store_true", help="no prefill and no single blocks")
    parser.add_argument("--counts", action="store_true", help="functions and launches of a token")
    parser.add_argument("--rows", action="append", type=int, help="tokens of a single block; repeatable")
    parser.add_argument("--layers", type=int, help="another number than the model's")
    parser.add_argument("--sparse", default="auto", help="the path of ReLU blocks")
    parser.add_argument("--columns", action="store_true", help="W_down of patched ReLU blocks lies by columns")
    parser.add_argument("--graphs", action="store_true", help="a block and a step of a model as CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="generate with a static cache, compiled")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = Results(__file__)
    options.tokens = options.tokens if CUDA else 12
    for name in options.model or SIZES:
        if options.layers:
            SIZES[name][1]["num_hidden_layers"] = options.layers
        plain = make(name)
        patched, copied = copy.deepcopy(plain), copy.deepcopy(plain)
        if options.columns and name.endswith("relu"):
            by_columns(patched)
        print(f"\n== {name}\n{patch(patched, sparse=options.sparse if name.endswith('relu') else False)}", flush=True)
        models = {"plain": plain, "patched": patched, "copy": copied}
        if options.graphs or options.compile:
            del models["copy"], copied
        with torch.no_grad():
            if options.graphs:
                graphs(results, name, models, options.batch or [1, 4, 16])
            elif options.compile:
                compiled(results, name, models, options.batch or [1], options.tokens)
            else:
                eager(results, name, models, options)
        blocks = [module.__dict__.get("sparse_block") for module in patched.modules()]
        print(f"  last paths {sorted({block.last_path for block in blocks if block is not None})}", flush=True)
        models.clear()
        del plain, patched, blocks
        results.keep()


if __name__ == "__main__":
    main()
