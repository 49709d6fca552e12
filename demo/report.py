"""The demo's report: one HTML page that needs nothing else, and its main figures for the terminal."""

from __future__ import annotations

from html import escape
from typing import Any

from demo import plots
from demo.measure import GENERATED
from gossamer.cli.page import context, line, page, table, tiles


def headline(results: dict[str, Any]) -> list[tuple[str, str]]:
    """The main figures, each with a short name."""
    model, sae, loss, rates = results["model"], results["sae"], results["loss"], results["features"]["firing_rates"]
    largest = results["comparison"][-1]
    decode = largest["operations"][0]
    needle, blocks = results["needle"], results["block_sparse"]["cases"][-1]
    return [
        ("bits per byte on unseen text", f"{model['validation_bits_per_byte']:.2f}"),
        ("feed-forward neurons active", f"{model['active_fraction']:.1%}"),
        (f"latents active per byte (L0), of {sae['d_sae']:,}", f"{sae['l0']:.1f}"),
        ("variance explained by the autoencoder", f"{sae['variance_explained']:.1%}"),
        (
            "of the model's loss recovered with its reconstruction"
            + ("" if _zeroing_costs(loss) else ": zeroing the stream costs nothing"),
            loss_recovered(loss),
        ),
        (
            f"of the latents never fired on {results['features']['bytes_read']:,} unseen bytes",
            f"{rates.count(0) / len(rates):.1%}",
        ),
        (
            f"needles found with {needle['keys']} of {needle['length']} keys, which an indexer selects; with all "
            f"{needle['accuracy_all']:.1%}",
            f"{needle['accuracy_selected']:.1%}",
        ),
        (
            f"speed-up of {blocks['operation']} with {blocks['density']:.0%} of its blocks, over "
            f"{results['block_sparse']['length']:,} tokens",
            _ratio(blocks["speed_up"]),
        ),
        (
            f"speed-up of sparse decoding ({largest['name']}, {largest['d_sae']:,} latents, batch "
            f"{largest['batch']:,}): {_time(decode['sparse']['median_seconds'])} instead of "
            f"{_time(decode['dense']['median_seconds'])}",
            _ratio(decode["speed_up"]),
        ),
    ]


def loss_recovered(loss: dict[str, float]) -> str:
    """The share of the loss that the reconstruction recovers, in words where there is none."""
    return f"{loss['loss_recovered']:.1%}" if _zeroing_costs(loss) else "not defined"


def render(results: dict[str, Any]) -> str:
    """The whole page. Every piece of text that comes from outside is escaped."""
    text, model, sae = results["text"], results["model"]["history"][-1], results["sae"]["history"][-1]
    body = "\n".join(
        (
            "<header><h1>gossamer demo</h1>",
            f"<p>A byte-level transformer, trained on {model['tokens']:,} bytes, and a JumpReLU sparse autoencoder, "
            f"trained on {sae['tokens']:,}, both drawn from {text['train_bytes']:,} bytes of {escape(text['source'])}, "
            f"with gossamer&#8217;s sparse operators on {escape(_hardware(results))}.</p></header>",
            tiles(headline(results)),
            _model_section(results),
            _mlp_section(results["model"]),
            _sparse_section(results["model"]["sparse"]),
            _sae_section(results),
            _loss_section(results["loss"]),
            _comparison_section(results["comparison"]),
            _needle_section(results["needle"]),
            _blocks_section(results["block_sparse"]),
            _features_section(results),
            _footer(results),
        )
    )
    return page("gossamer demo", body)


def _model_section(results: dict[str, Any]) -> str:
    model, last = results["model"], results["model"]["history"][-1]
    sizes = results["settings"]["model"]
    blocks = ", ".join(f"{share:.1%}" for share in model["active_fraction_per_block"])
    return (
        "<h2>The model</h2>"
        f"<p>{sizes['n_layers']} blocks, d_model {sizes['d_model']}, {sizes['n_heads']} heads, context "
        f"{sizes['context']}, {model['parameters']:,} parameters; {last['step']:,} steps over {last['tokens']:,} bytes "
        f"in {last['seconds']:.0f} s. The feed-forward is down(relu(gate(x)) &middot; up(x)); an L1 penalty on "
        "relu(gate(x)) keeps most of its neurons at zero: on unseen text "
        f"{blocks} of them are active, block by block.</p>"
        f"<figure>{plots.model_plot(model['history'])}</figure>"
    )


def _mlp_section(model: dict[str, Any]) -> str:
    plain, case = model["layer_by_layer"], model["feed_forward"]
    with_memory = case["fused"]["peak_bytes"] is not None
    names = ("layer by layer, peak", "fused, peak") if with_memory else ()
    memory = (_bytes(case["plain"]["peak_bytes"]), _bytes(case["fused"]["peak_bytes"])) if with_memory else ()
    times = (_time(case["plain"]["median_seconds"]), _time(case["fused"]["median_seconds"]))
    return (
        "<h2>The feed-forward in one product</h2>"
        "<p>A nn.GatedMLP computes gate and up in one product and gates them where they are; plain PyTorch computes "
        "them layer by layer and writes each. The model is trained layer by layer, because the penalty needs the "
        "gate&#8217;s activations, and everything after that is fused. On unseen text the fused model has "
        f"{model['validation_bits_per_byte']:.4f} bits per byte, the other {plain['bits_per_byte']:.4f}; the largest "
        f"difference of a logit is {plain['largest_logit_difference']:.1e}, and {plain['generated_alike']} of the "
        f"{plain['generated']} bytes that each goes on with are the same.</p>"
        + table(
            f"The feed-forward of the middle block on {case['tokens']:,} bytes, {case['dtype']}",
            ("layer by layer", "fused", "speed-up", *names, "largest difference"),
            [(*times, _ratio(case["speed_up"]), *memory, f"{case['largest_difference']:.1e}")],
        )
    )


def _sparse_section(sparse: dict[str, Any]) -> str:
    rows = [
        (
            f"block {number}",
            f"{layer['mean']:.1f}",
            f"{layer['p99']}",
            f"{layer['max']}",
            f"{layer['dead']}",
            layer["path"],
        )
        for number, layer in enumerate(sparse["layers"], start=1)
    ]
    return (
        "<h2>The feed-forward, sparse</h2>"
        "<p>The same nn.GatedMLP with method=&quot;auto&quot; follows how many neurons its gate lets through, and "
        "where these are few it multiplies the weights of no others. The model goes on with "
        f"{sparse['generated_alike']} of the {sparse['generated']} bytes that it goes on with layer by layer. A byte "
        f"of {GENERATED} texts takes {_time(sparse['seconds_a_byte'])} so, and "
        f"{_time(sparse['seconds_a_byte_layer_by_layer'])} layer by layer, attention included "
        f"({_ratio(sparse['speed_up'])}).</p>"
        + table(
            f"Of the {sparse['layers'][0]['neurons']:,} neurons of each block, on unseen text",
            ("", "active, mean", "99%", "most", "never active", "path"),
            rows,
        )
    )


def _sae_section(results: dict[str, Any]) -> str:
    sae, last = results["sae"], results["sae"]["history"][-1]
    rates = results["features"]["firing_rates"]
    sizes = results["settings"]["model"]
    middle = sizes["n_layers"] // 2
    return (
        "<h2>The sparse autoencoder</h2>"
        f"<p>A JumpReLU autoencoder of {sae['d_sae']:,} latents on the residual stream after block {middle} of "
        f"{sizes['n_layers']}, trained with a target L0 of {results['settings']['target_l0']:g}, to which it comes "
        f"down in {results['settings']['warm_up']} steps; {last['step']:,} steps over {last['tokens']:,} bytes in "
        f"{last['seconds']:.0f} s. On {results['features']['bytes_read']:,} bytes of unseen text "
        f"{rates.count(0) / len(rates):.1%} of the latents never fire. The "
        "input scale is folded into the weights in sae/.</p>"
        f"<figure>{plots.sae_plot(sae['history'])}</figure>"
        + table(
            f"On {sae['tokens']:,} bytes of unseen text",
            ("", "sparse", "dense"),
            [
                ("L0", f"{sae['l0']:.2f}", f"{sae['l0_dense']:.2f}"),
                ("variance explained", f"{sae['variance_explained']:.2%}", f"{sae['variance_explained_dense']:.2%}"),
                ("largest absolute difference", f"{sae['largest_difference']:.1e}", ""),
            ],
        )
    )


def _loss_section(loss: dict[str, float]) -> str:
    rows = [
        ("residual stream left alone", "clean", ""),
        ("replaced by its sparse reconstruction", "spliced", "sparse"),
        ("the same, computed densely", "spliced_dense", "dense"),
        ("replaced by zero", "zero", ""),
    ]
    most = max(loss[key] for _, key, _ in rows)
    body = "".join(
        f'<tr><th scope="row">{name}</th><td class="number">{loss[key]:.4f}</td><td style="width: 45%">'
        f'<span class="bar {kind}" style="width: {100 * max(loss[key], 0) / most:.1f}%"></span></td></tr>'
        for name, key, kind in rows
    )
    recovered = (
        f"The reconstruction recovers {loss_recovered(loss)} of what zeroing the stream costs."
        if _zeroing_costs(loss)
        else "Zeroing the stream costs nothing: the share that the reconstruction recovers is not defined."
    )
    return (
        "<h2>What the reconstruction keeps</h2>"
        "<p>The model&#8217;s loss on unseen text when the residual stream is replaced on its way through the model. "
        f"{recovered}</p>"
        '<div class="wide"><table><thead><tr><th></th><th class="number">bits per byte</th><th></th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _zeroing_costs(loss: dict[str, float]) -> bool:
    return loss["zero"] > loss["clean"]


def _comparison_section(comparison: list[dict[str, Any]]) -> str:
    tables = []
    for case in comparison:
        with_memory = case["operations"][0]["sparse"]["peak_bytes"] is not None
        rows = []
        for operation in case["operations"]:
            dense, sparse = operation["dense"], operation["sparse"]
            memory = (_bytes(dense["peak_bytes"]), _bytes(sparse["peak_bytes"])) if with_memory else ()
            rows.append(
                (
                    operation["operation"],
                    _time(dense["median_seconds"]),
                    _time(sparse["median_seconds"]),
                    _ratio(operation["speed_up"]),
                    *memory,
                    f"{operation['largest_difference']:.1e}",
                )
            )
        memory_names = ("dense, peak", "sparse, peak") if with_memory else ()
        tables.append(
            table(
                f"{case['name']}: batch {case['batch']:,}, d_sae {case['d_sae']:,}, d_in {case['d_in']:,}, "
                f"L0 {case['l0']:.1f} (dense {case['l0_dense']:.1f}), {case['dtype']}",
                ("", "dense", "sparse", "speed-up", *memory_names, "largest difference"),
                rows,
            )
        )
    return (
        "<h2>Dense against sparse</h2>"
        "<p>Dense is plain PyTorch: a product with the whole decoder. Sparse reads the decoder rows of the latents "
        "that fired. &#8220;Decode&#8221; starts from dense activations, &#8220;decode, packed&#8221; from the rows "
        "that the encoder returns, &#8220;forward&#8221; is the whole autoencoder, whose encoder is a dense product "
        "either way. "
        "Medians of calls that take turns"
        f"{'; memory is the peak beyond what was held before' if with_memory else ''}.</p>"
        f"<figure>{plots.time_plot(comparison)}</figure>" + "".join(tables)
    )


def _needle_section(needle: dict[str, Any]) -> str:
    time = needle["time"]
    return (
        "<h2>Attention over selected keys</h2>"
        f"<p>A small model with two layers of nn.GatedSparseAttention reads {needle['length']} tokens, of which one is "
        "a needle, and names it at the end. It learned with all keys, then beside its indexers, and then with the "
        f"{needle['keys']} keys that these select for each query. Of {needle['questions']} new needles it finds "
        f"{needle['accuracy_all']:.1%} with all keys and {needle['accuracy_selected']:.1%} with {needle['keys']}.</p>"
        f"<figure>{plots.needle_plot(needle)}</figure>"
        + table(
            f"Causal attention alone: {time['length']:,} tokens, {time['heads']} heads of {time['head_dim']}, "
            f"{time['keys']} keys a query, {time['dtype']}; selecting the keys is not included",
            ("all keys", "selected keys", "speed-up", "largest difference from a dense mask"),
            [
                (
                    _time(time["dense_seconds"]),
                    _time(time["sparse_seconds"]),
                    _ratio(time["speed_up"]),
                    f"{time['largest_difference']:.1e}",
                )
            ],
        )
    )


def _blocks_section(found: dict[str, Any]) -> str:
    names = {"linear": "nn.BlockSparseLinear", "attention": "blocksparse.attention"}
    rows = [
        (
            names[case["operation"]],
            f"{case['density']:.0%}",
            _time(case["dense_seconds"]),
            _time(case["sparse_seconds"]),
            _ratio(case["speed_up"]),
            f"{case['largest_difference']:.1e}",
            f"{case['largest_value']:.2g}",
        )
        for case in found["cases"]
    ]
    return (
        "<h2>Block-sparse weights and attention</h2>"
        f"<p>A linear layer of {found['width']:,} by {found['width']:,} on {found['rows']:,} rows, of whose weight "
        f"some blocks of {found['block_size']} by {found['block_size']} are present; and causal attention over "
        f"{found['length']:,} tokens, {found['heads']} heads of {found['head_dim']}, in which a query meets the blocks "
        "of a window behind it and the first block. Dense is the product with the same weight, zeros and all, and "
        "attention to everything behind a query. The error is that of the block-sparse result against float64.</p>"
        f"<figure>{plots.blocks_plot(found)}</figure>"
        + table(
            f"In {found['dtype']}",
            ("", "blocks", "dense", "block-sparse", "speed-up", "largest error", "largest value"),
            rows,
        )
    )


def _features_section(results: dict[str, Any]) -> str:
    features = results["features"]
    cards = "".join(map(_card, features["top"]))
    return (
        "<h2>What the features are</h2>"
        f"<p>Out of {features['bytes_read']:,} bytes of unseen text. Candidates fire on 0.01% to 2% of the bytes. They "
        "are ranked by how much text two of their strongest contexts share up to and including the byte that fires, "
        "white space not counted; of features that share the same text one is shown. Contexts with the same run-up "
        "are shown once. All latents on that text are in latents/, for <code>gossamer sae show latents --feature "
        "N</code> and <code>gossamer sae report latents</code>.</p>"
        f"<figure>{plots.rate_plot(features['firing_rates'])}</figure>"
        + (f'<div class="cards">{cards}</div>' if cards else "<p>No feature fired often enough to be shown.</p>")
    )


def _card(feature: dict[str, Any]) -> str:
    fires_on = ", ".join(f"{line(f['byte'])} {f['share']:.0%}" for f in feature["fires_on"] if f["share"] >= 0.01)
    contexts = "".join(context(c["value"], c["before"], c["character"], c["after"]) for c in feature["contexts"])
    return (
        f'<article class="card"><h3>{feature["feature"]} <span class="text">{line(feature["shared_text"])}</span>'
        f'</h3><p class="facts">fires on {feature["firing_rate"]:.2%} of bytes: {fires_on}</p>'
        f"<ol>{contexts}</ol></article>"
    )


def _footer(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    commit = f", commit {results['commit']}" if results["commit"] else ""
    return (
        f"<footer><p><code>{escape(results['command'])}</code></p><p>{escape(results['created'])}, seed "
        f"{results['seed']}{escape(commit)}. {escape(versions)}. {escape(_hardware(results))}. "
        "All figures are in results.json beside this page.</p></footer>"
    )


def _hardware(results: dict[str, Any]) -> str:
    hardware = results["hardware"]
    threads = hardware.get("threads")
    return hardware["name"] + (f", {threads} thread{'s' * (threads > 1)}" if threads else "")


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _bytes(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2g}×" if ratio < 10 else f"{ratio:.0f}×"
