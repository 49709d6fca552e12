"""`python -m demo`, whole and in miniature, on the CPU."""

import errno
import io
import json
import math
import re
import shlex
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from demo import __main__ as program
from demo import features, measure, needle, report, run
from demo.model import ByteModel, ModelConfig
from demo.text import load_corpus
from demo.train import Clock, sample, variance_explained
from gossamer.cli import environment, main
from gossamer.extract import Extraction, extract
from gossamer.extract.text import Text
from gossamer.nn import JumpReLUSAE, load_sae

SMALL = ModelConfig(d_model=32, n_layers=2, n_heads=2, d_ff=64, context=32)
HOSTILE = "<script src='https://example.org/x.js'></script> & \"quoted\"\t\x01 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    for i in range(6):
        lines = (f"{HOSTILE}the value of item {i + j} is {j * j} größer\n" for j in range(200))
        (root / f"<b>{i}.txt").write_text("".join(lines), encoding="utf-8")
    (root / "picture.png").write_bytes(b"\x89PNG\0\0" + bytes(1000))
    (root / ".hidden").write_text("hidden" * 1000)
    return root


def settings_for(folder: Path, out: Path, **others: object) -> run.Settings:
    small: dict = {
        "steps_model": 150,
        "steps_sae": 150,
        "steps_needle": 30,
        "attention_length": 256,
        "linear_width": 128,
        "seconds_compare": 0.2,
        "seconds_features": 60.0,
        "model": SMALL,
        "d_sae": 256,
        "target_l0": 12.0,
        "batch_sae": 256,
        "batch_compare": 256,
        "n_validation": 16,
        "n_feature_windows": 256,
        "n_features": 6,
        "large": False,
    }
    return run.Settings(text=folder, device="cpu", out=out, **{**small, **others})


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out") / "[" / "report]"  # what rich would take for markup


@pytest.fixture(scope="module")
def results(folder: Path, out: Path) -> dict:
    settings = settings_for(folder, out)
    returned = run.run(settings, *run.prepare(settings), Console(quiet=True))
    assert sorted(p.name for p in out.iterdir()) == ["index.html", "latents", "results.json", "sae"]
    read = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert read["sae"]["l0"] == returned["sae"]["l0"]
    return {**read, "html": (out / "index.html").read_text(encoding="utf-8")}


def test_training_learns(results: dict) -> None:
    model, sae, loss = results["model"], results["sae"], results["loss"]
    assert model["history"][-1]["bits_per_byte"] < model["history"][0]["bits_per_byte"] - 1
    assert model["validation_bits_per_byte"] == pytest.approx(loss["clean"])
    assert 0 < model["active_fraction"] < 0.5
    assert sae["history"][-1]["variance_explained"] > 0.5
    assert sae["l0"] == pytest.approx(12, rel=0.25)
    assert loss["clean"] < loss["spliced"] < loss["zero"]
    expected = (loss["zero"] - loss["spliced"]) / (loss["zero"] - loss["clean"])
    assert loss["loss_recovered"] == pytest.approx(expected)


def test_dense_and_sparse_agree(results: dict) -> None:
    sae, loss, (case,) = results["sae"], results["loss"], results["comparison"]
    assert sae["l0"] == pytest.approx(sae["l0_dense"], rel=1e-3)
    assert sae["variance_explained"] == pytest.approx(sae["variance_explained_dense"], rel=1e-4)
    assert sae["largest_difference"] < 1e-4
    assert loss["spliced"] == pytest.approx(loss["spliced_dense"], rel=1e-4)
    assert (case["batch"], case["d_in"], case["d_sae"]) == (256, 32, 256)
    assert [o["operation"] for o in case["operations"]] == ["decode", "decode, packed", "forward"]
    for operation in case["operations"]:
        assert operation["largest_difference"] < 1e-4
        for path in ("dense", "sparse"):
            assert 0 < operation[path]["p20_seconds"] <= operation[path]["median_seconds"]
            assert operation[path]["peak_bytes"] is None
        ratio = operation["dense"]["median_seconds"] / operation["sparse"]["median_seconds"]
        assert operation["speed_up"] == pytest.approx(ratio)


def test_the_fused_feed_forward_keeps_the_model(results: dict) -> None:
    """Logits, perplexity and what it generates, against the same weights layer by layer."""
    model = results["model"]
    plain, case = model["layer_by_layer"], model["feed_forward"]
    assert plain["bits_per_byte"] == pytest.approx(model["validation_bits_per_byte"], rel=1e-5)
    assert plain["largest_logit_difference"] < 1e-4
    assert plain["generated_alike"] == plain["generated"] == 8 * 32
    assert case["tokens"] == 16 * 32 and case["largest_difference"] < 1e-4
    assert 0 < case["fused"]["median_seconds"] == pytest.approx(case["plain"]["median_seconds"] / case["speed_up"])
    assert "256 of the 256 bytes that each goes on with are the same" in results["html"]


def test_the_sparse_feed_forward_keeps_the_model(results: dict) -> None:
    """The same bytes, and entries of each block that are those of its gate."""
    model, sparse = results["model"], results["model"]["sparse"]
    assert sparse["generated_alike"] == sparse["generated"] == 8 * 32
    assert 0 < sparse["seconds_a_byte"] == pytest.approx(sparse["seconds_a_byte_layer_by_layer"] / sparse["speed_up"])
    assert len(sparse["layers"]) == 2
    for layer, share in zip(sparse["layers"], model["active_fraction_per_block"], strict=True):
        assert layer["neurons"] == 64 and layer["mean"] == pytest.approx(64 * share, rel=1e-4)
        assert layer["mean"] <= layer["p99"] + 1 and layer["p99"] <= layer["max"] <= 64
        assert 0 <= layer["dead"] < 64
        assert layer["path"] in ("gather", "fused", "dense")
    assert "goes on with 256 of the 256 bytes that it goes on with layer by layer" in results["html"]


def test_the_sparse_path_is_not_kept() -> None:
    torch.manual_seed(0)
    model, tokens = ByteModel(SMALL), torch.randint(256, (4, 33))
    measure.sparse_feed_forward(model, tokens, seconds=0.01)
    assert all(block.mlp.method == "fused" for block in model.blocks)


def test_attention_over_selected_keys(results: dict) -> None:
    needle = results["needle"]
    assert [row["keys"] for row in needle["by_keys"]] == [1, 2, 4, 8, 16, 32]
    (found,) = (row["selected"] for row in needle["by_keys"] if row["keys"] == needle["keys"] == 8)
    assert found == needle["accuracy_selected"]
    time = needle["time"]
    assert (time["length"], time["keys"]) == (256, 128) and time["largest_difference"] < 1e-4
    assert 0 < time["sparse_seconds"] == pytest.approx(time["dense_seconds"] / time["speed_up"])
    assert f"{needle['accuracy_all']:.1%} with all keys and {found:.1%} with 8" in results["html"]
    said = dict(report.headline(results))
    assert said[f"needles found with 8 of 64 keys, which an indexer selects; with all {needle['accuracy_all']:.1%}"]
    assert said["speed-up of attention with 90% of its blocks, over 256 tokens"]


def test_block_sparse_operations(results: dict) -> None:
    found = results["block_sparse"]
    assert [case["operation"] for case in found["cases"]] == ["linear"] * 4 + ["attention"] * 3
    assert found["cases"][0]["density"] == 1
    # Of 4 rows of blocks a causal model sees 10 blocks; the windows leave out block (3, 1).
    assert [case["density"] for case in found["cases"][4:]] == [0.9, 0.9, 0.9]
    for case in found["cases"]:
        assert case["largest_difference"] < 1e-4 * max(case["largest_value"], 1)
        assert 0 < case["sparse_seconds"] == pytest.approx(case["dense_seconds"] / case["speed_up"])
    assert "nn.BlockSparseLinear" in results["html"] and "blocksparse.attention" in results["html"]


@pytest.mark.full
@pytest.mark.native
def test_the_needle_is_found_with_few_keys() -> None:
    """With what the indexer selects nearly always, and hardly more often than by chance with the last keys."""
    found = needle.needle_stage(
        torch.device("cpu"), 0, Clock(0, 160), seconds=0.01, length=128, show=lambda done, state: None
    )
    # 160 steps are few: a twentieth of the questions may still need another key.
    assert found["accuracy_all"] > 0.95 and found["accuracy_selected"] >= found["accuracy_all"] - 0.05
    recent = {row["keys"]: row["recent"] for row in found["by_keys"]}
    assert recent[8] < 0.5


def test_results_say_how_they_were_made(results: dict, folder: Path) -> None:
    assert results["seed"] == 0
    assert results["settings"]["d_sae"] == 256
    assert results["settings"]["text"] == str(folder)
    assert results["versions"]["torch"] == torch.__version__
    assert results["hardware"]["type"] == "cpu"
    assert results["text"]["files"] == 6
    assert len(results["features"]["firing_rates"]) == 256


def test_page_says_how_much_was_trained_on(results: dict) -> None:
    seen = [150 * 8 * 32, 150 * 256]
    assert [results[name]["history"][-1]["tokens"] for name in ("model", "sae")] == seen
    page = results["html"]
    assert f"transformer, trained on {seen[0]:,} bytes," in page
    assert f"trained on {seen[1]:,}, both drawn from {results['text']['train_bytes']:,} bytes of" in page


def test_speed_up_says_of_what(results: dict) -> None:
    (trained,) = results["comparison"]
    assert "decoding (trained SAE, 256 latents, batch 256): " in report.headline(results)[-1][0]
    untrained = {**trained, "name": "untrained SAE", "d_sae": 65536, "batch": 32}
    name, _ = report.headline({**results, "comparison": [trained, untrained]})[-1]
    assert "decoding (untrained SAE, 65,536 latents, batch 32): " in name


def test_summary_is_ascii(results: dict) -> None:
    (case,) = results["comparison"]
    decode = {**case["operations"][0], "speed_up": 27.0, "sparse": {"median_seconds": 3.4e-6}}
    console = Console(width=200, file=io.StringIO())
    with console.capture() as shown:
        console.print(run.summary({**results, "comparison": [{**case, "operations": [decode]}]}))
    assert "27x" in shown.get() and ": 3.4 us instead of " in shown.get()


def test_page_is_self_contained_and_escapes_text(results: dict) -> None:
    page = results["html"]
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)\b", page)
    assert not re.search(r"""(src|href|action)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"url\((?!#)|@import", page)
    assert "\x01" not in page and "\0" not in page
    assert page.count("<svg") == page.count("</svg>") == 6
    for word in ("NaN", "None", "var(--sparse)", "prefers-color-scheme: dark"):
        assert (word in page) == (word[0] not in "N")


def test_text_in_the_page_is_escaped(results: dict) -> None:
    context = {"before": HOSTILE, "character": "<", "after": "&amp;\n", "value": 1.0}
    feature = {
        "feature": 3,
        "score": 4.0,
        "firing_rate": 0.01,
        "shared_text": "</h3><script>",
        "fires_on": [{"byte": "<", "share": 1.0}],
        "contexts": [context],
    }
    page = report.render({**results, "features": {**results["features"], "top": [feature]}, "command": HOSTILE})
    assert "<script" not in page
    assert "&lt;script src=&#x27;https://example.org/x.js&#x27;&gt;" in page
    assert "<mark>&lt;</mark>" in page
    assert "&amp;amp;⏎" in page
    assert r"&quot;quoted&quot;⇥\x01" in page


class Bytes:
    """Rows that are latents already, each with its byte: windows `[n, T]` and latents `[n * T, d_sae]`."""

    def __init__(self, windows: torch.Tensor, acts: torch.Tensor) -> None:
        starts = torch.zeros(windows.shape, dtype=torch.bool)
        starts[:, 0] = True
        spelled = {byte: bytes([byte]).decode(errors="surrogateescape") for byte in range(256)}
        self.text = Text(windows.flatten().int(), starts.flatten(), spelled)
        self.acts, self.W_enc = acts, torch.empty(acts.shape[1], acts.shape[1])

    def __len__(self) -> int:
        return len(self.acts)

    def rows_from(self, start: int) -> Iterator[torch.Tensor]:
        yield self.acts[start:]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_features_are_found_where_they_fire(tmp_path: Path) -> None:
    text = b"".join(b"%03d self.name%03d = other\n" % (i, 997 * i % 1000) for i in range(100))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // 50 * 50].view(-1, 50)
    flat = tokens.flatten()
    acts = torch.zeros(flat.numel(), 3)
    after_self = [i for i in range(4, flat.numel()) if bytes(flat[i - 4 : i + 1].tolist()) == b"self."][:40]
    acts[after_self, 1] = 2.0
    acts[:, 2] = 1.0
    source = Bytes(tokens, acts)
    # Files that are shorter than what lies between the firings.
    rows = extract(source, source, tmp_path / "rows", batch_size=64, shard_rows=64, top=features.TOP)
    assert rows.firing_counts.tolist() == [0, 40, flat.numel()]
    (found,) = features.top_features(rows, 5)
    assert found["feature"] == 1
    assert found["shared_text"].endswith("self.")
    assert found["firings"] == 40
    assert found["firing_rate"] == pytest.approx(40 / flat.numel())
    assert found["largest_value"] == 2.0
    assert found["fires_on"] == [{"byte": ".", "share": 1.0}]
    assert {c["character"] for c in found["contexts"]} == {"."}
    assert all(c["before"].endswith(" self") for c in found["contexts"])
    with_line = {row for row in range(flat.numel()) if flat[row] == ord("\n")}
    counts = features._fired_on(rows, [2, 0])
    assert counts[0, ord("\n")] == len(with_line) and counts[0].sum() == flat.numel() and counts[1].sum() == 0


def test_the_stream_is_a_source_with_its_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ByteModel(SMALL)
    windows = torch.randint(256, (40, 32), dtype=torch.uint8)
    windows[3, 5:8] = torch.tensor([*"€".encode()], dtype=torch.uint8)
    windows[3, 4] = ord("a")
    source = features.residual_source(model, windows)
    assert len(source) == 40 * 32
    x = torch.cat(list(source.rows_from(0)))
    torch.testing.assert_close(x, model.residual(windows).detach().flatten(0, 1))
    found = extract(source, JumpReLUSAE(32, 64), tmp_path / "latents", batch_size=256, shard_rows=512)
    assert torch.equal(torch.cat([found.tokens(i) for i in range(3)]), windows.flatten().int())
    for row in (3 * 32 + 5, 3 * 32 + 7):
        before, character, _ = found.context(row, 48, 24)
        assert character == "€" and before.endswith("a") and len(before) <= 5


def test_what_is_saved_is_what_was_measured(results: dict, out: Path) -> None:
    sae, found = load_sae(out / "sae").eval(), Extraction(out / "latents")
    x = torch.from_numpy(np.load(out / "sae" / "activations.npy"))
    assert x.shape == (features.WINDOWS_AT_ONCE * 32, 32)
    with torch.no_grad():
        assert variance_explained(x, sae(x)) > 0.5
        dense = measure.dense_encode(sae, x)
    torch.testing.assert_close(found.read(0).to_dense()[: len(x)], dense)
    size = (x - x.mean(0)).square().sum(1).mean().sqrt() * results["sae"]["activation_scale"]
    assert 0.6 < size / 32**0.5 < 1.6
    assert sae.input_scale == results["sae"]["activation_scale"] > 0
    described = results["features"]
    assert described["bytes_read"] == found.rows
    assert described["firing_rates"] == pytest.approx((found.firing_counts / found.rows).tolist())
    for feature in described["top"]:
        assert feature["firings"] == found.firing_counts[feature["feature"]]
        assert feature["contexts"][0]["value"] == found.top_values[feature["feature"], 0]
        assert sum(byte["share"] for byte in feature["fires_on"]) <= 1 + 1e-6
    never = described["firing_rates"].count(0) / 256
    assert (f"of the latents never fired on {found.rows:,} unseen bytes", f"{never:.1%}") in report.headline(results)
    # One count of silent latents, and no other.
    assert "dead" not in results["sae"]["history"][-1] and not re.search(r"[\d.]+% dead", results["html"])
    assert results["html"].count(f"{never:.1%} of the latents never fire") == 1


def test_the_commands_that_it_names_run(results: dict, out: Path) -> None:
    for command in run.go_on(out, results):
        name, *arguments = shlex.split(command)
        assert name.endswith("gossamer")
        outcome = CliRunner().invoke(main, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
        assert outcome.exit_code == 0, outcome.output
    assert "The latents of a sparse autoencoder on" in (out / "latents" / "index.html").read_text("utf-8")
    assert (out / "index.html").read_text(encoding="utf-8") == results["html"]


def test_it_starts_afresh_and_leaves_what_it_cannot_finish(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(seed: int) -> None:
        settings = settings_for(
            folder, tmp_path, steps_model=2, steps_sae=2, steps_needle=3, seconds_compare=0.01, seed=seed
        )
        monkeypatch.setattr(needle, "QUESTIONS", 4)
        run.run(settings, *run.prepare(settings), Console(quiet=True))

    def contents() -> dict[str, bytes]:
        return {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    go(0)
    (tmp_path / "latents" / "index.html").touch()  # as `gossamer sae report` leaves it
    first = contents()
    with monkeypatch.context() as patch:
        patch.setattr("demo.run.report.render", interrupt)  # the last step
        with pytest.raises(KeyboardInterrupt, match="nothing was written"):
            go(1)
    assert contents() == first
    go(1)
    second = contents()
    assert second.keys() == first.keys() - {"latents/index.html"}
    for file in ("results.json", "sae/sae_weights.safetensors", "latents/shard-000000.safetensors"):
        assert second[file] != first[file]


@pytest.mark.parametrize("name", ["sae", "latents"])
def test_what_is_not_its_own_is_not_replaced(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=f"in which {name} is free or a demo's, got .*; name another one"):
        run.prepare(settings_for(folder, tmp_path))
    assert (tmp_path / name / "manifest.json").read_text() == "{}"


def test_model_reads_and_replaces_the_middle_of_the_stream() -> None:
    torch.manual_seed(0)
    model = ByteModel(SMALL)
    tokens = torch.randint(256, (2, 32))
    gates: list[torch.Tensor] = []
    logits = model(tokens, gates=gates)
    torch.testing.assert_close(model(tokens), logits)
    assert logits.shape == (2, 32, 256)
    assert [g.shape for g in gates] == [(2, 32, 64)] * 2
    middle = model.residual(tokens)
    torch.testing.assert_close(model(tokens, lambda x: middle), logits)
    assert not torch.allclose(model(tokens, torch.zeros_like), logits)
    changed = tokens.clone()
    changed[:, 20:] = 0
    torch.testing.assert_close(model(changed)[:, :20], logits[:, :20])


def test_loss_recovered_has_its_end_points() -> None:
    torch.manual_seed(0)
    model, tokens = ByteModel(SMALL), torch.randint(256, (4, 33))
    clean = measure.evaluate(model, tokens)
    assert measure.evaluate(model, tokens, lambda x: x) == pytest.approx(clean)
    active = measure.layer_by_layer(model, tokens)["active_fraction_per_block"]
    assert len(active) == 2 and all(0 < share < 1 for share in active)
    assert measure.evaluate(model, tokens, torch.zeros_like) == pytest.approx(8.0)


def test_loss_recovered_is_not_defined_where_zeroing_costs_nothing(results: dict) -> None:
    torch.manual_seed(0)
    model, tokens = ByteModel(SMALL), torch.randint(256, (4, 33))
    clean = measure.evaluate(model, tokens)
    loss = measure.splice_losses(model, JumpReLUSAE(32, 64), tokens, clean)
    assert loss["zero"] < loss["clean"] and math.isnan(loss["loss_recovered"])
    for said in (loss, run._plain(loss)):
        name, value = report.headline({**results, "loss": said})[4]
        assert value == "not defined" and name.endswith(": zeroing the stream costs nothing")
        page = report.render({**results, "loss": said})
        assert "the share that the reconstruction recovers is not defined" in page
        assert not re.search(r"\bnan\b|NaN|None", page)


def test_large_autoencoder_has_its_l0_and_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("D_SAE", 4096), ("D_IN", 64), ("BATCH", 8), ("L0", 16)):
        monkeypatch.setattr(measure, f"LARGE_{name}", size)
    monkeypatch.setattr(measure, "SMALLEST_LARGE_D_SAE", 256)
    for free, d_sae in ((None, 4096), (2**30, 4096), (2 * 16 * 1024 * 64, 1024), (1, 256)):
        monkeypatch.setattr(measure, "free_bytes", lambda device, free=free: free)
        sae, x = measure.large_sae(torch.device("cpu"), 0)
        assert sae.d_sae == d_sae
        assert measure.quality(sae, x)["l0"] == 16
    assert measure.quality(sae, x)["largest_difference"] < 1e-5


def test_corpus_is_split_by_file(folder: Path) -> None:
    corpus = load_corpus(folder, seed=1, min_bytes=100)
    assert corpus.n_files == 6
    size = (folder / "<b>0.txt").stat().st_size
    assert len(corpus.validation) == pytest.approx(size, rel=0.01)
    assert len(corpus.train) == pytest.approx(5 * size, rel=0.01)
    assert b"hidden" not in bytes(corpus.train.tolist())
    again = load_corpus(folder, seed=1, min_bytes=100)
    assert torch.equal(corpus.validation, again.validation)


@pytest.mark.parametrize("sizes", [(65_600, 400), (50_000, 20_000, 1_000), (300, 300, 300)])
def test_a_tenth_is_kept_of_large_files(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * size)
    for seed in range(8):
        corpus = load_corpus(tmp_path, seed=seed, min_bytes=10)
        assert len(corpus.validation) / sum(sizes) == pytest.approx(0.1, rel=0.1)
        counts = torch.cat([corpus.train, corpus.validation]).bincount(minlength=128)
        assert tuple(counts[65 : 65 + len(sizes)].tolist()) == sizes


def test_files_stay_whole_where_they_can(tmp_path: Path) -> None:
    for i, size in enumerate((9_000, *[100] * 10)):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * size)
    for seed in range(8):
        corpus = load_corpus(tmp_path, seed=seed, min_bytes=10)
        assert (corpus.train == 65).sum() == 9_000 and len(corpus.validation) == 10 * 100 + 9


def test_one_file_is_split_within(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(range(256)) * 10)
    corpus = load_corpus(tmp_path / "one", seed=0, min_bytes=100)
    assert bytes(torch.cat([corpus.train, corpus.validation]).tolist()) == bytes(range(256)) * 10
    assert len(corpus.validation) == 256


def test_no_more_is_read_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(2**27)
    monkeypatch.setattr("demo.text.MAX_BYTES", 10_000)
    tracemalloc.start()
    corpus = load_corpus(tmp_path / "long", seed=0, min_bytes=100)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(corpus.train) + len(corpus.validation) == 10_000
    assert most < 2**24


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path, mode: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(ValueError, match=rf"--text must be readable, got {folder}/.*txt: Input/output error; name"):
        load_corpus(folder, seed=0, min_bytes=100)


def test_standard_library_is_the_default() -> None:
    corpus = load_corpus(None, seed=0, min_bytes=100_000)
    assert "standard library" in corpus.source
    assert len(corpus.train) > 1_000_000


def test_samples_lie_within_the_text() -> None:
    text = torch.arange(40, dtype=torch.uint8)
    windows = sample(text, 200, 33, torch.Generator().manual_seed(0))
    assert windows.shape == (200, 33)
    assert set(windows[:, 0].tolist()) == set(range(8))
    assert (windows.diff(dim=1) == 1).all()
    even = measure.contexts(text, 100, 20)
    assert even[:, 0].tolist() == [0, 20]


def _texts(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    return {
        "does not exist": tmp_path / "missing",
        "is neither": Path("/dev/null"),
        "empty folder": tmp_path / "empty",
        "got 0 and 0": tmp_path / "nothing.txt",
        "got 4 and 1": tmp_path / "short.txt",
    }


@pytest.mark.parametrize("message", ["does not exist", "is neither", "empty folder", "got 0 and 0", "got 4 and 1"])
def test_unusable_text_is_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_corpus(_texts(tmp_path)[message], seed=0, min_bytes=100)


@pytest.mark.parametrize("name", ["meta", "cpu:3", "cuda:99", "abacus"])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--device must be auto or a device of this machine"):
        environment.resolve_device(name, "demo")


def test_command_refuses_before_it_trains(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    outcome = CliRunner().invoke(program.main, ["--text", str(tmp_path / "missing"), "--out", str(out)])
    assert outcome.exit_code == 2
    assert "does not exist" in _words(outcome.output)
    (tmp_path / "file").touch()
    outcome = CliRunner().invoke(program.main, ["--text", str(folder), "--out", str(tmp_path / "file")])
    assert outcome.exit_code == 2
    assert "demo: --out must be a folder that can be written to, got" in _words(outcome.output)


def _words(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_is_said(number: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(run, "_experiment", interrupted)
    # Processes that a shell starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    outcome = CliRunner().invoke(program.main, ["--text", str(folder), "--out", str(tmp_path)])
    assert outcome.exit_code == 130
    assert outcome.output.endswith("demo: interrupted; nothing was written\n")
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) is before


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    model = ByteModel(SMALL)
    with pytest.raises(RuntimeError, match="stop"), run.fastest_threads(model, torch.randint(256, (2, 32))):
        assert 1 <= torch.get_num_threads() <= before
        raise RuntimeError("stop")
    assert torch.get_num_threads() == before
    assert all(p.grad is None for p in model.parameters())


def test_json_holds_no_nan() -> None:
    assert run._plain({"a": [math.nan, 1.0, Path("p")], "b": math.inf}) == {"a": [None, 1.0, "p"], "b": None}
