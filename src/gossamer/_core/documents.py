"""Files of a folder, and documents of text files."""

import json
from collections.abc import Iterator
from pathlib import Path


def documents(operator: str, path: Path) -> Iterator[str]:
    """The documents of a file, or of a folder's .txt and .jsonl files in the order of their names: of a .jsonl file one
    a line, its string or that under "text", of any other the whole file."""
    for file in files(operator, path, (".txt", ".jsonl")):
        yield from _read(operator, file)


def files(operator: str, path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, or the files of a folder with these suffixes in the order of their names."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in suffixes and file.is_file())
        if not found:
            raise ValueError(f"{operator}: {path} holds no {' and no '.join(suffixes)} file.")
        return found
    if not path.is_file():
        raise FileNotFoundError(f"{operator}: there is no file {path}.")
    return [path]


def _read(operator: str, file: Path) -> Iterator[str]:
    try:
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8-sig")
            return
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                found = json.loads(line)
                document = found.get("text") if isinstance(found, dict) else found
                if not isinstance(document, str):
                    raise ValueError(f'{operator}: line {number} of {file} must be a string, or have one under "text".')
                yield document
    except UnicodeDecodeError as error:
        raise ValueError(f"{operator}: {file} is not UTF-8: {error}.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{operator}: line {number} of {file} is not JSON: {error}.") from error
