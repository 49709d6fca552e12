"""The folder that `extract` writes to: a file counts once the manifest names it, and is whole by then."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossamer._core import files
from gossamer.extract.seal import of_json, seal

_OPERATOR = "extract"
MANIFEST, VOCABULARY = "manifest.json", "vocabulary.json"
VERSION = 2
# The fields of a manifest that are read. Other settings are compared, and may be missing on either side.
_MANIFEST: dict[str, Any] = {"settings": dict, "shards": list, "nonfinite": int, "complete": bool}
_SETTINGS, _STATISTICS = {"d_sae": int, "top": int}, {"file": str, "sha256": str}
_SHARD = {"file": str, "rows": int, "nnz": int, "source": str, "sha256": str}
# The one key of a file's metadata: safetensors writes several in an order that differs from run to run.
_METADATA = "gossamer"
WAY_OUT = (
    f"Put a whole copy back; or remove it and {MANIFEST}, and the same call of extract goes on from the whole "
    "shards before it."
)
_REBUILT = "The same call of extract makes it again from the shards."


class Damaged(ValueError):
    """A file that has changed since it was written, or is not there."""

    def __init__(self, operator: str, file: Path, reason: str, way_out: str = WAY_OUT) -> None:
        super().__init__(f"{operator}: {file} is damaged: {reason}. {way_out}")
        self.reason = reason


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def statistics_name(number: int) -> str:
    """Of the rows up to the end of shard `number`."""
    return f"statistics-{number:06d}.safetensors"


def read_manifest(operator: str, folder: Path) -> dict[str, Any] | None:
    """None where there is none; raises Damaged where it has changed since it was written."""
    file = folder / MANIFEST
    manifest = read_json(operator, file, _REBUILT)
    if manifest is None:
        return None
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if not isinstance(version, int):
        raise Damaged(operator, file, "it is no manifest of an extraction", _REBUILT)
    if version != VERSION:
        raise ValueError(
            f"{operator}: {file} is no manifest of version {VERSION}, but of {version}. Read it with the version of "
            "gossamer that wrote it, or a later one."
        )
    if manifest.pop("sha256", None) != of_json(manifest):
        raise Damaged(operator, file, "its checksum differs", _REBUILT)
    if not (
        _has(manifest, _MANIFEST)
        and _has(manifest["settings"], _SETTINGS)
        and all(_has(shard, _SHARD) for shard in manifest["shards"])
        and (manifest.get("statistics", ...) is None or _has(manifest["statistics"], _STATISTICS))
    ):
        raise Damaged(operator, file, "it does not say all that a manifest says", _REBUILT)
    return dict(manifest)


def _has(found: Any, kinds: dict[str, Any]) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(name, ...), kind) for name, kind in kinds.items())


def read_json(operator: str, file: Path, way_out: str) -> Any:
    """None where there is no such file."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise Damaged(operator, file, str(error), way_out) from error


def load(operator: str, file: Path, sha256: str | None) -> dict[str, Tensor]:
    """The tensors of a file, once they are known to be those of this seal; None where they are known already."""
    described, tensors = open_sealed(operator, file)
    if sha256 is not None and sealed(operator, file, described, tensors) != sha256:
        raise Damaged(operator, file, "its checksum differs")
    return tensors


def open_sealed(operator: str, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A file's metadata, and its tensors, which are mapped."""
    with reading(operator, file), safe_open(file, framework="pt") as opened:
        names, described = opened.keys(), _described(operator, file, opened.metadata())
        return described, {name: opened.get_tensor(name) for name in names}


def describe(operator: str, file: Path) -> dict[str, Any]:
    """A file's metadata; empty if it has none of ours."""
    with reading(operator, file), safe_open(file, framework="pt") as opened:
        return _described(operator, file, opened.metadata())


def _described(operator: str, file: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        described = json.loads((metadata or {}).get(_METADATA, "{}"))
    except ValueError:
        described = None
    if not isinstance(described, dict):
        raise Damaged(operator, file, "its metadata cannot be read")
    return described


def sealed(operator: str, file: Path, described: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The seal of tensors that were read; raises Damaged where the file has another seal in it."""
    said = {name: value for name, value in described.items() if name != "sha256"}
    found = seal(said, tensors)
    if described.get("sha256", found) != found:
        raise Damaged(operator, file, "its checksum differs")
    return found


@contextmanager
def reading(operator: str, file: Path) -> Iterator[None]:
    """Turns the errors of reading a file of safetensors into errors with a way out."""
    try:
        yield
    except FileNotFoundError as error:
        if file.exists():
            # safetensors finds no file where it may not read one.
            raise PermissionError(errno.EACCES, f"{operator}: {file} may not be read", str(file)) from error
        raise FileNotFoundError(f"{operator}: {file} is gone. {WAY_OUT}") from error
    except SafetensorError as error:
        raise Damaged(operator, file, str(error)) from error


def write(file: Path, tensors: dict[str, Tensor], described: dict[str, Any] | None = None) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = None if described is None else {_METADATA: json.dumps(described, sort_keys=True)}
    files.write_whole(_OPERATOR, file, partial(file), lambda path: save_file(whole, path, metadata))


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_json(folder / MANIFEST, manifest | {"sha256": of_json(manifest)})


def write_json(file: Path, content: Any) -> None:
    write_bytes(file, (json.dumps(content, indent=1) + "\n").encode())


def write_bytes(file: Path, content: bytes) -> None:
    files.write_whole(_OPERATOR, file, partial(file), lambda path: path.write_bytes(content))


def partial(file: Path) -> Path:
    """Where a file is written."""
    return file.with_name(file.name + ".partial")
