"""English text of Debian's packages as a corpus for `gossamer train`: documentation, reference works, a few books.

    python -m benchmarks.train.text corpus

downloads the packages with `apt-get download`, takes the English documents out of them, and writes a `.jsonl` file for
each package, a document a line, and `SOURCES.md` with versions and sizes. Licences are those of the packages; most
are free documentation licences, and each package's own stands in its `usr/share/doc/*/copyright`.

A document has to be English by its commonest words. A line that a package repeats more than three times, as the
navigation of a manual's pages, is left out from then on.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = {
    "anarchism": "CC-BY-SA-3.0, GFDL", "apache2-doc": "Apache-2.0", "autoconf-doc": "GFDL-1.3",
    "bind9-doc": "MPL-2.0", "cmake-doc": "BSD-3",
    "cppreference-doc-en-html": "CC-BY-SA-3.0", "debian-handbook": "GPL-2+ or CC-BY-SA-3.0",
    "debian-reference-en": "GPL-2+", "dict-foldoc": "GFDL-1.1", "dict-gcide": "GPL-3+", "erlang-doc": "Apache-2.0",
    "exim4-doc-html": "GPL-2+", "fortunes": "BSD-3", "gap-doc": "GPL-2+", "gimp-help-en": "GFDL-1.2+",
    "git-doc": "GPL-2", "gnome-user-docs": "CC-BY-3.0", "harden-doc": "GPL-2+", "jargon-text": "public domain",
    "libboost1.81-doc": "BSL-1.0", "libreoffice-help-en-us": "MPL-2.0", "linux-doc-6.1": "GPL-2",
    "llvm-15-doc": "Apache-2.0 with LLVM exception", "manpages": "GPL-2+, verbatim", "manpages-dev": "GPL-2+, verbatim",
    "maxima-doc": "GPL-2+", "nodejs-doc": "MIT", "octave-doc": "GPL-3+", "openjdk-17-doc": "GPL-2 with exception",
    "perl-doc": "Artistic or GPL-1+", "postgresql-doc-15": "PostgreSQL", "python-django-doc": "BSD-3",
    "python-pandas-doc": "BSD-3", "python-scipy-doc": "BSD-3", "python-sympy-doc": "BSD-3", "python3.11-doc": "PSF-2",
    "qtbase5-doc-html": "GFDL-1.3", "rust-doc": "MIT or Apache-2.0", "selinux-policy-doc": "GPL-2+",
    "sqlite3-doc": "public domain", "vim-doc": "Vim", "wordnet-base": "WordNet",
}  # fmt: skip
"""Debian 12's, with their main licences."""
_SKIPPED = re.compile(
    r"/(copyright|changelog|NEWS|src|search|genindex|_sources|implementors|lintian|bug)\b"
    r"|/share/help/(?!C/)|/debian-handbook/html/(?!en-US)|/ldoc/|\.(idx|dat|png|jpe?g|gif|svg|pdf|epub|css|js|zip|woff2?)$"
)
_DROPPED = re.compile(r"(?is)<(script|style|head|nav|footer|svg)\b.*?</\1\s*>|<!--.*?-->")
_BLOCKS = re.compile(r"(?i)</?(p|div|h\d|li|ul|ol|tr|table|pre|br|dt|dd|dl|section|article|blockquote)\b[^>]*>")
_ROFF = re.compile(r"(?m)^[.'].*$|\\f.|\\[&|]|\\\(..")
_WORDS = re.compile(r"[a-z']+")
_COMMON = frozenset(re.findall(r"\w+", "the of and to a in is that it for as with be this are or by on"))
ENGLISH = 0.15
"""The least share of the commonest words in an English document; tables and listings have fewer."""
LEAST, LONGEST, REPEATS = 400, 200_000, 3
"""Characters of a document at least and at most, and copies of a line in a package that are kept."""


def text_of(file: Path) -> str:
    """The text of a file as a reader sees it; nothing of a file that is no text."""
    raw = file.read_bytes()
    name = file.name
    if raw[:2] == b"\x1f\x8b":
        raw, name = gzip.decompress(raw), file.stem
    if b"\0" in raw[:4096]:
        return ""
    text = raw.decode("utf-8", errors="replace")
    if name.startswith("data.") and "wordnet" in str(file):
        return "\n".join(line.partition("| ")[2] for line in text.splitlines())
    if re.search(r"\.x?html?(\.en)?$", name) or text[:200].lstrip().lower().startswith(("<!doctype", "<html", "<?xml")):
        return html.unescape(re.sub(r"<[^>]*>", "", _BLOCKS.sub("\n", _DROPPED.sub("", text))))
    if re.search(r"\.[1-8]\w*$", name):
        return _ROFF.sub("", text.replace("\\-", "-"))
    return text


def documents(folder: Path) -> Iterator[str]:
    """The English documents of an unpacked package."""
    seen: Counter[int] = Counter()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        if file.stat().st_size > 2**26 or _SKIPPED.search(str(file.relative_to(folder))):
            continue
        kept = []
        for line in text_of(file).splitlines():
            line = line.rstrip()
            seen[hash(line)] += bool(line)
            if seen[hash(line)] <= REPEATS and (line or (kept and kept[-1])):
                kept.append(line)
        text = "\n".join(kept).strip()
        words = _WORDS.findall(text.lower())
        if len(text) >= LEAST and sum(word in _COMMON for word in words) >= ENGLISH * len(words):
            yield from (text[first : first + LONGEST] for first in range(0, len(text), LONGEST))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the corpus")
    parser.add_argument("--megabytes", type=float, default=10, help="text of a package at most")
    parser.add_argument("--debs", type=Path, help="folder for the packages; one that is there is not downloaded again")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = ["| package | version | licence | documents | MB |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as temporary:
        debs = (given.debs or Path(temporary) / "debs").resolve()
        debs.mkdir(parents=True, exist_ok=True)
        missing = [name for name in PACKAGES if not list(debs.glob(f"{name}_*.deb"))]
        if missing:
            subprocess.run(["apt-get", "download", *missing], cwd=debs, check=True)
        for name, licence in PACKAGES.items():
            deb, folder = next(debs.glob(f"{name}_*.deb")), Path(temporary, name)
            subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
            size = count = 0
            with (given.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for text in documents(folder):
                    if size + len(text) > given.megabytes * 1e6:
                        break
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                    size, count = size + len(text), count + 1
            subprocess.run(["rm", "-r", folder], check=True)
            lines.append(f"| {name} | {deb.name.split('_')[1]} | {licence} | {count:,} | {size / 1e6:.1f} |")
            print(lines[-1], flush=True)
    (given.out / "SOURCES.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
