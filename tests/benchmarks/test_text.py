"""English documents out of an unpacked package."""

import gzip
from pathlib import Path

import pytest

from benchmarks.train.text import LEAST, LONGEST, documents

pytestmark = pytest.mark.native
ENGLISH = "This is a page of the manual, and it says that the tool is to be used with care by all of its users. "


def write(folder: Path, name: str, content: str | bytes) -> None:
    file = folder / "usr/share" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_english_documents_are_found_and_all_else_is_left(tmp_path: Path) -> None:
    body = "".join(f"<p>{i}: {ENGLISH}</p>" for i in range(8))
    page = f"<!DOCTYPE html><head><title>no</title></head><script>var x;</script>Navigation of all<br>{body}&amp; more"
    for number in range(6):
        write(tmp_path, f"doc/a/{number}.html", page.replace("<p>", f"<p>{number}."))
    write(tmp_path, "doc/a/manual.1.gz", gzip.compress((".TH X 1\n" + "\\fBbold\\fR " + ENGLISH * 6).encode()))
    write(tmp_path, "doc/a/changelog.txt", ENGLISH * 9)
    write(tmp_path, "help/de/page.txt", ENGLISH * 9)
    write(tmp_path, "doc/a/german.txt", "Das ist eine Seite des Handbuchs, die niemand liest, der nicht muss. " * 9)
    write(tmp_path, "doc/a/table.txt", "0x3f 17 alpha beta gamma delta\n" * 90)
    write(tmp_path, "doc/a/short.txt", ENGLISH)
    write(tmp_path, "doc/a/binary.txt", b"\0" + ENGLISH.encode() * 9)
    found = list(documents(tmp_path))
    assert len(found) == 7
    assert sum("Navigation of all" in text for text in found) == 3, "a line that comes again and again is dropped"
    assert "& more" in found[0] and "var x" not in found[0] and "<p>" not in found[0] and "no" not in found[0].split()
    assert found[-1].startswith("bold " + ENGLISH[:20])


def test_long_documents_are_cut(tmp_path: Path) -> None:
    write(tmp_path, "doc/book.txt", "\n".join(f"{i}. {ENGLISH}" for i in range(3 * LONGEST // len(ENGLISH))))
    found = list(documents(tmp_path))
    assert len(found) == 4 and all(LEAST <= len(text) <= LONGEST for text in found)
