"""The examples in public docstrings run and print what they say, and those of README and of the pages run."""

import doctest
import importlib
import pkgutil
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import gossamer
from gossamer.cli import main

ROOMS = sorted(m.name for m in pkgutil.iter_modules(gossamer.__path__) if m.name[0] != "_" and m.name != "cli")


def public(room: ModuleType) -> list[str]:
    return [name for name in getattr(room, "__all__", []) if callable(getattr(room, name))]


def imports(name: str) -> list[str]:
    """The lines after which the examples of a room run; its page of reference begins with them."""
    rooms = dict.fromkeys(("rowsparse", "testing", "gemm", "sae", name))
    lines = ["import gossamer, torch", "from gossamer import gemm, rowsparse, sae, testing"]
    return [*lines, *(f"from gossamer.{room} import *" for room in rooms)]


@pytest.mark.parametrize("name", ROOMS)
def test_examples(name: str) -> None:
    names: dict[str, Any] = {}
    exec("\n".join(imports(name)), names)
    room = importlib.import_module(f"gossamer.{name}")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(room, name, globs=dict(names))
    for item in public(room):
        found = finder.find(names[item], f"{name}.{item}", globs=dict(names))
        if name != "nn" and not isinstance(names[item], type):
            assert any(test.examples for test in found), f"{name}.{item} has no example"
        tests += found
    report: list[str] = []
    for test in tests:
        torch.manual_seed(0)
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


HOUSE = Path(__file__).parents[1]
# The worked example has a test of its own, and what several processes run has those of tests/distributed.
PAGES = ["README.md", *(str(page.relative_to(HOUSE)) for page in sorted((HOUSE / "docs").rglob("*.md")))]
PAGES = [page for page in PAGES if page not in ("docs/worked-example.md", "docs/distributed.md")]

HOLDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "docs/sparsity.md": lambda names: names["found"].tokens == names["batches"][0].numel(),
    "docs/sparse-attention.md": lambda names: names["y"].shape == (2, 100, 64) and bool(names["loss"].isfinite()),
    "docs/integrations.md": lambda names: (
        names["text"].shape == (1, 68) and names["logits"].shape == (1, 64, 97) and names["same"]
    ),
}
"""Of the results of a page's blocks."""


@pytest.mark.parametrize("page", PAGES)
def test_snippets(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of Python, one after the other as a reader pastes them; without those that download a model."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for language, content in _blocks(page):
        if language == "python" and 'from_pretrained("' not in content:
            if "sae_lens" in content:
                pytest.importorskip("sae_lens")
            if "learn_tokenizer" in content:
                pytest.importorskip("tokenizers")
            if "transformers" in content:
                pytest.importorskip("transformers")
            exec(content, names)
            # What the page says of shapes.
            for name, shape in re.findall(r"^(\w+) = .*# \[([\d, ]+)\]$", content, re.M):
                assert list(names[name].shape) == [int(size) for size in shape.split(",")]  # type: ignore[attr-defined]
    assert HOLDS.get(page, lambda _: True)(names)


def test_commands_that_pages_name_exist() -> None:
    """`gossamer ...` in a line of code or in a block of commands."""
    known = typer.main.get_command(main).commands  # type: ignore[attr-defined]
    code = re.compile(r"^```(\w*)\n(.*?)^```$|(`[^`\n]+`)", re.S | re.M)
    named = {
        (page, name)
        for page in [*PAGES, "CONTRIBUTING.md", "docs/worked-example.md", "docs/distributed.md"]
        for language, block, line in code.findall((HOUSE / page).read_text(encoding="utf-8"))
        if language in ("", "sh", "bash")
        for name in re.findall(r"(?:^|`|--no-python )gossamer ([a-z]+)", block or line, re.M)
    }
    assert {(page, name) for page, name in named if name not in known} == set() and len(named) >= 8


def test_the_first_example_reconstructs_its_input(capsys: pytest.CaptureFixture[str]) -> None:
    """As README says below it: an error near or above 1 would be that of an autoencoder that does not work."""
    pytest.importorskip("sae_lens")
    torch.manual_seed(0)
    exec(_blocks("README.md")[0][1], {})
    said = capsys.readouterr().out
    errors = re.search(r"unexplained variance: ([\d.]+) unpatched, ([\d.]+) patched", said)
    assert errors is not None and all(float(error) < 0.1 for error in errors.groups()), said
    shown = (
        (HOUSE / "README.md").read_text(encoding="utf-8").partition("before and after:\n\n```\n")[2].partition("```")[0]
    )
    assert [line.split(":")[0] for line in said.splitlines()] == [line.split(":")[0] for line in shown.splitlines()]


def _blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of the blocks of a page that are meant to be run, in order."""
    text = (HOUSE / page).read_text(encoding="utf-8")
    return re.findall(r"^```(sh|python)\n(.*?)^```$", text, re.S | re.M)


@pytest.mark.full
def test_the_worked_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block as it stands, one after the other; in shorter time, and with a small model in the place of GPT-2."""
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("sae_lens")
    from demo import __main__ as demo
    from tests.integrations.test_transformers import byte_level

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=7, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
    byte_level().save_pretrained("gpt2")
    Path("corpus.txt").write_text("A cat sat on the mat, and the hat. " * 400)
    names: dict[str, object] = {}
    languages = []
    for language, content in _blocks("docs/worked-example.md"):
        languages.append(language)
        if language == "python":
            exec(content, names)
            continue
        for command in content.splitlines():
            name, *arguments = shlex.split(command.replace("-model 20", "-model 3").replace("-sae 20", "-sae 5"))
            program = main if name == "gossamer" else demo.main
            arguments = arguments if name == "gossamer" else arguments[arguments.index("demo") + 1 :]
            outcome = CliRunner().invoke(program, arguments)
            assert outcome.exit_code == 0, outcome.output
    assert languages.count("sh") == 3 and languages.count("python") == 6
    assert names["found"].rows == len(names["source"]) > 0
    assert names["together"].max() > 0 and names["latents"].shape == (2048, 4096)


def test_the_site_names_all_that_is_public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make docs` builds without a warning, and each public name has its place in the reference."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.chdir(HOUSE)
    build(load_config(str(HOUSE / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    modules = [name for name in ROOMS if name != "integrations"]
    for name in [*modules, "integrations.sae_lens", "integrations.transformers"]:
        if name == "integrations.sae_lens":
            pytest.importorskip("sae_lens")
        page = (tmp_path / "api" / f"{name}.html").read_text(encoding="utf-8")
        places = set(re.findall(r'id="gossamer\.([\w.]+)"', page))
        room = importlib.import_module(f"gossamer.{name}")
        said = re.sub(r"<[^>]+>", "", page)
        assert all(line in said for line in imports(name))
        wanted = getattr(room, "__all__", None) or ["patch", "unpatch"]
        assert {f"{name}.{item}" for item in wanted} <= places
        assert name != "rowsparse" or "rowsparse.Rows.ablate" in places
        assert "&gt;&gt;&gt; " not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.S)
