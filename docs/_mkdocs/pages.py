"""A hook of MkDocs: pages that are not in docs/, and links that hold in the repository made to hold in the site.

README becomes the start page. CHANGELOG, CONTRIBUTING and each script of the gallery get pages of their own, and each
room gets a page of reference, filled by mkdocstrings, which begins with the imports of its examples. Documents link to
one another as they lie in the repository, so that they can be read there. A link to a file that is no part of the site,
such as a result, becomes its text.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
BESIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ROOMS = sorted(p.parent.name for p in (ROOT / "src/gossamer").glob("*/__init__.py") if p.parent.name[0] != "_")
MODULES = [*(room for room in ROOMS if room not in ("cli", "integrations")), "testing"]
MODULES += [f"integrations.{path.parent.name}" for path in (ROOT / "src/gossamer/integrations").glob("*/__init__.py")]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for picture in (ROOT / "benchmarks/results").glob("*.png"):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    for module in MODULES:
        rooms = dict.fromkeys(("rowsparse", "testing", "gemm", "sae", module))
        lines = ["import gossamer, torch", "from gossamer import gemm, rowsparse, sae, testing"]
        lines += [f"from gossamer.{room} import *" for room in rooms]
        code = "\n".join(["```python", *lines, "```"])
        content = f"# gossamer.{module}\n\nThe examples of this page begin after these imports:\n\n{code}\n\n"
        content += f"::: gossamer.{module}\n"
        files.append(File.generated(config, f"api/{module}.md", content=content))
    for script in sorted((ROOT / "docs/gallery").glob("*.py")):
        files.append(File.generated(config, f"gallery/{script.stem}.md", content=_gallery(script)))
    return files


def _gallery(script: Path) -> str:
    """A script of the gallery as a page: what it says of itself, what it draws, and all of it."""
    source = script.read_text(encoding="utf-8")
    _, said, code = source.split('"""', 2)
    title, text = said.split("\n", 1)
    return (
        f"# {title.removesuffix('.')}\n{text}\n![what it draws]({script.stem}.png)\n\n"
        f"`python docs/gallery/{script.name}` makes this picture, on two cores within two minutes.\n\n"
        f"```python{code.rstrip()}\n```\n"
    ).replace("```python\n\n", "```python\n")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    beside = {page: name for name, page in BESIDE.items()}
    folder = posixpath.dirname(beside.get(here, f"docs/{here}"))

    def linked(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        path, anchor = re.match(r"([^#]*)(.*)", target).groups()  # type: ignore[union-attr]
        if not path or re.match(r"\w+:", path):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        there = BESIDE.get(path) or re.sub(r"^(docs|benchmarks(?=/results/.*\.png$))/", "", path)
        there = re.sub(r"^(gallery/\w+)\.py$", r"\1.md", there)
        if files.get_file_from_path(there) is None:
            if path.startswith("docs/"):
                return match[0]  # a page that is missing: MkDocs says so
            return text
        return f"{picture}[{text}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"

    # Not in code: neither in blocks nor within a line.
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`(?!\]))", markdown, flags=re.S | re.M)
    return "".join(part if part.startswith("`") else LINK.sub(linked, part) for part in parts)
