"""Activations of a Hugging Face model: rows, text, and extraction from them, without a network."""

import doctest
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer import train
from gossamer.extract import Extraction, extract
from gossamer.nn import TopKSAE, load_sae, save_sae

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from gossamer.integrations import transformers as integration  # noqa: E402
from gossamer.integrations.transformers import Activations  # noqa: E402
from tests.extract.extraction import Killed, contents, stop_at  # noqa: E402

pytestmark = pytest.mark.native

D = 32
TEXTS = ["A cat sat on the mat.", "", "Grüße, 世界! 🐈", "One more document, which is longer than a context is." * 2]
SIZES = {"batch_size": 8, "shard_rows": 32, "top": 4}


def byte_level() -> Any:
    """A tokenizer of bytes, and of a few words with the space before them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0} | {piece: number for number, piece in enumerate(alphabet, 1)}
    merges = []
    for first, second in (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "t")):
        merges.append((first, second))
        vocabulary[first + second] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


def words() -> Any:
    """A tokenizer of words, without BOS and without a decoder."""
    names = ("[UNK]", *sorted({word for text in TEXTS for word in text.split()}))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def language_model(family: str = "gpt2") -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=D, n_layer=3, n_head=2)
        return transformers.GPT2LMHeadModel(config).eval()
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
    config = transformers.LlamaConfig(vocab_size=300, hidden_size=D, max_position_embeddings=64, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


def autoencoder() -> TopKSAE:
    torch.manual_seed(0)
    return TopKSAE(D, 64, 4)


def expected_contexts(tokenizer: Any, size: int) -> list[list[int]]:
    """Contexts as the documentation has them, token by token."""
    bos, packed = tokenizer.bos_token_id, []
    for text in TEXTS:
        for number, token in enumerate(tokenizer(text, add_special_tokens=False)["input_ids"]):
            if bos is not None and (number == 0 or len(packed) % size == 0):
                packed.append(bos)
                if len(packed) % size == 0:
                    packed.append(bos)
            packed.append(token)
    return [packed[i : i + size] for i in range(0, len(packed), size)]


@pytest.mark.parametrize("family, hook, layer", [("gpt2", "transformer.h.1", 2), ("llama", "model.layers.0", 1)])
@pytest.mark.parametrize("tokenizer", [byte_level, words])
def test_rows_are_the_hidden_states(family: str, hook: str, layer: int, tokenizer: Any) -> None:
    """Of every token but BOS, as the whole model has them in `hidden_states`, context by context."""
    model, tokenizer = language_model(family), tokenizer()
    source = Activations(model, tokenizer, TEXTS, hook, context_size=12, batch_size=3)
    rows, tokens = [], []
    with torch.no_grad():
        for context in expected_contexts(tokenizer, 12):
            states = model(input_ids=torch.tensor([context]), output_hidden_states=True).hidden_states[layer][0]
            kept = torch.tensor([token != tokenizer.bos_token_id for token in context])
            rows.append(states[kept])
            tokens += [token for token in context if token != tokenizer.bos_token_id]
    found = torch.cat(list(source))
    assert len(source) == len(tokens) == found.shape[0]
    assert source.text.tokens.tolist() == tokens and source.text.tokens.dtype == torch.int32
    torch.testing.assert_close(found, torch.cat(rows), rtol=1e-4, atol=1e-5)
    assert "rows=" in repr(source)


def test_rows_from_anywhere_are_the_same_bits() -> None:
    source = Activations(language_model(), byte_level(), TEXTS, "transformer.h.1", context_size=12, batch_size=3)
    rows = torch.cat(list(source))
    for start in (0, 1, 10, 11, 33, 34, len(source) - 1):
        assert torch.equal(torch.cat(list(source.rows_from(start))), rows[start:])
    assert not list(source.rows_from(len(source)))


def test_input_and_what_runs() -> None:
    """The input of a block is the output of the one before; what comes behind the hook does not run."""
    model = language_model().train()
    ran: list[str] = []
    model.transformer.h[2].register_forward_hook(lambda *_: ran.append("2"))
    before = Activations(model, byte_level(), TEXTS, "transformer.h.0", context_size=12)
    given = Activations(model, byte_level(), TEXTS, "transformer.h.1", context_size=12, which="input")
    assert torch.equal(torch.cat(list(before)), torch.cat(list(given)))
    assert not ran and all(module.training for module in model.modules())
    assert not model.transformer.h[0]._forward_hooks and not model.transformer.h[1]._forward_pre_hooks
    ids = torch.arange(12)[None]
    model.eval()
    clean = language_model()
    assert torch.equal(model(input_ids=ids).logits, clean(input_ids=ids).logits)


@pytest.mark.parametrize("family, before, hook", [("gpt2", "transformer.h.0", "transformer.h.1"),
                                                  ("llama", "model.layers.0", "model.layers.1")])  # fmt: skip
def test_losses_with_edited_rows(family: str, before: str, hook: str) -> None:
    """Of the tokens that are rows, context by context; an output and the input of the module behind it are the same."""
    model, tokenizer = language_model(family), byte_level()
    source = Activations(model, tokenizer, TEXTS, before, context_size=12, batch_size=3)
    given = Activations(model, tokenizer, TEXTS, hook, context_size=12, batch_size=3, which="input")
    contexts, bos = expected_contexts(tokenizer, 12), tokenizer.bos_token_id

    def expected(edit: Any) -> float:
        total, count = 0.0, 0
        for context in contexts:
            kept = torch.tensor([token != bos for token in context])

            def put(module: Any, args: Any, out: Any, kept: Any = kept) -> Any:
                value = (out[0] if isinstance(out, tuple) else out).clone()
                value[0, kept] = edit(value[0, kept])
                return (value, *out[1:]) if isinstance(out, tuple) else value

            handle = model.get_submodule(before).register_forward_hook(put)
            with torch.no_grad():
                scores = model(input_ids=torch.tensor([context])).logits[0].double().log_softmax(-1)
            handle.remove()
            for place, token in enumerate(context[1:]):
                if token != bos:
                    total, count = total - float(scores[place, token]), count + 1
        return total / count

    edits = [lambda rows: rows, torch.zeros_like, lambda rows: rows.flip(1) * 5]
    for each in (source, given):
        found = each.losses(*edits, batches=99)
        assert found == pytest.approx([expected(edit) for edit in edits], rel=1e-5) and len(set(found)) == 3
    assert source.losses(edits[1], batches=1) != source.losses(edits[1], batches=2)
    assert not model.get_submodule(hook)._forward_pre_hooks and not model.get_submodule(before)._forward_hooks


def test_losses_of_a_model_without_a_head_and_of_a_module_that_returns_an_output() -> None:
    """A base model has no logits, and its whole output may be edited where a head follows."""
    model, tokenizer = language_model(), byte_level()
    edits = [lambda rows: rows, torch.zeros_like, lambda rows: rows.flip(1) * 5]
    sizes = {"context_size": 12, "batch_size": 3}
    assert Activations(model.transformer, tokenizer, TEXTS, "h.1", **sizes).losses(*edits) == []
    base = Activations(model, tokenizer, TEXTS, "transformer", **sizes).losses(*edits)
    assert base == Activations(model, tokenizer, TEXTS, "lm_head", which="input", **sizes).losses(*edits)
    assert len(set(base)) == 3


def test_autoencoders_train_on_a_model(tmp_path: Path) -> None:
    """One pass of the model serves a sweep, and its loss says how much of it each autoencoder recovers."""
    model = language_model()
    source = Activations(model, byte_level(), TEXTS * 9, "transformer.h.1", context_size=12, batch_size=3)
    config = train.SAEConfig(d_sae=64, lr=3e-3, batch=16, buffer=64, steps=150, sweep={"l0": [1, 16]})
    runs = []
    for name in ("a", "b"):
        runs.append(train.SAERun(config, source, tmp_path / name, checkpoint_every=40, log_every=20))
        runs[-1].train()
    few, many = runs[0].results
    assert runs[0].results == runs[1].results and few["explained"] < many["explained"]
    own, without, ours = source.losses(lambda rows: rows, torch.zeros_like, load_sae(tmp_path / "a" / "l0=16").eval())
    assert many["loss recovered"] == pytest.approx((without - ours) / (without - own), abs=1e-3)
    assert [many["model loss"], many["loss without"]] == [own, without]


def test_extraction_with_its_text(tmp_path: Path) -> None:
    model, tokenizer, sae = language_model(), byte_level(), autoencoder()
    source = Activations(model, tokenizer, TEXTS, "transformer.h.1", context_size=12, batch_size=3)
    found = extract(source, sae, tmp_path / "out", **SIZES)
    rows = torch.cat(list(source))
    dense = torch.cat([sae.eval().encode(part).to_dense() for part in rows.split(8)])
    assert torch.equal(torch.cat([shard.to_dense() for shard in found]), dense)
    plain = extract(rows, sae, tmp_path / "plain", **SIZES)
    assert not plain.has_text and found.has_text and len(found) > 2
    for ask in (lambda: plain.context(0), lambda: plain.tokens(0)):
        with pytest.raises(ValueError, match="holds no tokens; extract from a source that has them"):
            ask()
    assert torch.equal(torch.cat([found.tokens(shard) for shard in range(len(found))]), source.text.tokens)
    # All of the text, put together from single contexts, whatever shards they lie in.
    texts = [""]
    for row in range(found.rows):
        before, token, after = found.context(row, before=100, after=100)
        assert "\N{REPLACEMENT CHARACTER}" not in token or len(before + token + after) < 20
        text = before + token + after
        if bool(source.text.starts[row]):
            assert before == "" or ord(token[0]) > 127
            texts.append(text)
        else:
            assert text == texts[-1]
    joined = "".join(text for text in texts)
    assert "A cat sat" in joined and "Grüße" in joined and joined.startswith("A cat sat o")
    assert found.context(1, before=0, after=1)[0] == ""
    for row in (-1, found.rows):
        with pytest.raises(IndexError, match="row must be at least 0"):
            found.context(row)


def test_characters_in_pieces(tmp_path: Path) -> None:
    """A character of several tokens is shown whole, wherever among its bytes the row stands."""
    source = Activations(language_model(), byte_level(), ["x 世🐈 y"], "transformer.h.1", context_size=32)
    found = extract(source, autoencoder(), tmp_path, **SIZES)
    assert [found.context(row)[1] for row in range(found.rows)] == ["x", " ", *"世" * 3, *"🐈" * 4, " ", "y"]
    assert found.context(3) == ("x ", "世", "🐈 y")


def test_pieces_of_other_tokenizers() -> None:
    source = Activations(language_model(), words(), ["the moon"], "transformer.h.1", context_size=8)
    assert list(source.text.vocabulary.values()) == [" [UNK]", " the"]

    class SentencePiece:
        bos_token_id = None

        def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
            return {"input_ids": [[0, 1, 2] for _ in texts]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["▁the", "<0xE4>", "▁"][i] for i in ids]

        def convert_tokens_to_string(self, raw: list[str]) -> str:
            return "".join("\N{REPLACEMENT CHARACTER}" if t == "<0xE4>" else t.replace("▁", " ") for t in raw)

    source = Activations(language_model(), SentencePiece(), ["?"], "transformer.h.1", context_size=8)
    assert source.text.vocabulary == {0: " the", 1: "\udce4", 2: " "}


def test_resumed(tmp_path: Path) -> None:
    """The same bytes after a break, without reading again what lies before."""
    sae, calls = autoencoder(), []

    def make(texts: list[str] = TEXTS) -> Activations:
        return Activations(language_model(), byte_level(), texts, "transformer.h.1", context_size=12, batch_size=3)

    extract(make(), sae, tmp_path / "whole", **SIZES)

    with pytest.raises(Killed):
        extract(make(), sae, tmp_path / "out", progress=stop_at(80), **SIZES)
    with pytest.raises(ValueError, match="text = another one"):
        extract(make([*TEXTS, "more"]), sae, tmp_path / "out", **SIZES)
    with pytest.raises(ValueError, match="text = another one"):
        extract(torch.cat(list(make())), sae, tmp_path / "out", **SIZES)
    again = make()
    again._model.register_forward_pre_hook(lambda *_: calls.append(0))
    extract(again, sae, tmp_path / "out", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    # The first batch is compared, and then come those from row 64 on, of 27 or 30 rows each.
    assert len(calls) <= 1 + -(-(len(again) - 54) // 27)


def test_files(tmp_path: Path) -> None:
    def tokens(texts: Any) -> list[int]:
        return Activations(language_model(), byte_level(), texts, "lm_head", context_size=12).text.tokens.tolist()

    (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    lines = [json.dumps({"text": TEXTS[1]}), "", json.dumps(TEXTS[2]), json.dumps({"text": TEXTS[3], "id": 3})]
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "other.bin").write_bytes(b"\xff")
    assert tokens(tmp_path) == tokens(TEXTS) == tokens(iter(TEXTS))
    assert tokens([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == tokens(TEXTS)
    for texts, error, message in (
        (tmp_path / "none.txt", FileNotFoundError, "there is no file"),
        (tmp_path / "other.bin", ValueError, "is not UTF-8"),
        ("a text", TypeError, r"A file is Path\(name\), a single text \[text\]"),
        ([3], TypeError, "item 0 of texts must be a string or a Path, got 3"),
    ):
        with pytest.raises(error, match=message):
            tokens(texts)
    for content, message in (("{", "line 1 of .* is not JSON"), ('{"a": 1}', "line 1 of .* must be a string")):
        (tmp_path / "b.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            tokens(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.txt and no \.jsonl"):
        tokens(tmp_path / "empty")


def test_nothing_to_read(tmp_path: Path) -> None:
    source = Activations(language_model(), byte_level(), ["", ""], "transformer.h.1", context_size=12)
    assert len(source) == 0
    with pytest.raises(ValueError, match="source has no rows"):
        extract(source, autoencoder(), tmp_path, **SIZES)


def test_errors(tmp_path: Path) -> None:
    model, tokenizer = language_model(), byte_level()

    def make(hook: str = "transformer.h.1", **changed: Any) -> Activations:
        options: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "texts": TEXTS, "context_size": 12}
        return Activations(hook=hook, **(options | changed))

    for changed, error, message in (
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"tokenizer": 3}, TypeError, "tokenizer must be one of transformers, got int"),
        ({"context_size": 1}, ValueError, "context_size must be at least 2, got 1"),
        ({"context_size": 65}, ValueError, "context_size must be at most 64, the positions that the model has, got 65"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"which": "both"}, ValueError, 'which must be "output" or "input", got'),
        ({"hook": "transformer.h.9"}, ValueError, r"got 'transformer.h.9'. Near it: transformer\.h\."),
    ):
        with pytest.raises(error, match=message):
            make(**changed)
    small = language_model()
    small.resize_token_embeddings(200)
    with pytest.raises(ValueError, match="and the model knows 200"):
        make(model=small)
    with pytest.raises(ValueError, match=r"the output of transformer\.wpe must have shape \[B, T, d\] = \[16, 12, d\]"):
        list(make("transformer.wpe", texts=TEXTS * 9))
    model.unused = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unused did not run when the model read text"):
        list(make("unused"))
    with pytest.raises(ValueError, match=r"must have shape .* with d_in = 32 like the SAE, got 300"):
        extract(make("lm_head"), autoencoder(), tmp_path, **SIZES)


def test_an_error_half_way(tmp_path: Path) -> None:
    """Whole shards are kept, and the run goes on when the model works again."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.left = language_model(), 4

        def forward(self, input_ids: Tensor) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("out of luck")
            return self.inner(input_ids=input_ids).logits

    def make(model: Any, hook: str) -> Activations:
        return Activations(model, byte_level(), TEXTS, hook, context_size=12, batch_size=3)

    model, sae = Fails(), autoencoder()
    with pytest.raises(RuntimeError, match="out of luck"):
        extract(make(model, "inner.transformer.h.1"), sae, tmp_path / "out", **SIZES)
    assert 0 < Extraction(tmp_path / "out").rows < len(make(model, "inner"))
    model.left = 100
    extract(make(model, "inner.transformer.h.1"), sae, tmp_path / "out", **SIZES)
    extract(make(language_model(), "transformer.h.1"), sae, tmp_path / "whole", **SIZES)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from gossamer.cli import main

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["sae", *map(str, arguments)], env={"COLUMNS": "250", "TERM": "dumb"})
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, " ".join(result.output.split()).replace("│ ", "")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    language_model().save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    save_sae(autoencoder(), tmp_path / "sae")
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    here = ("--out", tmp_path / "out", "--device", "cpu")
    sizes = ("--context-size", 12, "--contexts", 3, "--batch-size", 8, "--shard-rows", 32)
    extracted = ("extract", tmp_path / "sae", tmp_path / "a.txt", *here, *sizes, "--model")
    for _ in range(2):
        code, output = run(*extracted, tmp_path / "model", "--hook", "transformer.h.1")
        assert code == 0 and "latents a row" in output, output
    found = Extraction(tmp_path / "out")
    busiest = int(found.firing_counts.argmax())
    code, output = run("show", tmp_path / "out", "--feature", busiest)
    before, token, after = found.context(int(found.top_positions[busiest, 0]))
    assert code == 0 and " ".join(f"{before}«{token}»{after}".replace("\n", "⏎").split()) in output
    for arguments, message in (
        ((*extracted, tmp_path / "model"), "--model and --hook belong together"),
        ((*extracted, tmp_path / "none", "--hook", "x"), "--model: "),
        ((*extracted, tmp_path / "model", "--hook", "x"), "hook must name a module of the model, got 'x'"),
        ((*extracted, tmp_path / "model", "--hook", "x", "--key", "k"), "--key names a tensor of activations"),
    ):
        code, output = run(*arguments)
        assert code == 2 and message in output, output


def test_the_example(tmp_path: Path) -> None:
    names = {"model": language_model(), "tokenizer": byte_level(), "folder": tmp_path}
    names |= {"Activations": Activations, "extract": extract, "TopKSAE": TopKSAE}
    (found,) = doctest.DocTestFinder(recurse=False).find(integration.Activations, globs=names)
    assert found.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found).failed == 0


def test_no_token_is_lost_over_many_sizes() -> None:
    tokenizer = byte_level()
    ids = [token for text in TEXTS for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    for size in (2, 3, 7, 21, 22, 23, 64):
        source = Activations(language_model(), tokenizer, TEXTS, "transformer.h.0", context_size=size)
        assert source.text.tokens.tolist() == ids
        assert np.array_equal(np.concatenate([source._ids]), np.concatenate(expected_contexts(tokenizer, size)))
