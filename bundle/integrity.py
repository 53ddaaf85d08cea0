"""Check a bundle's files: manifest.json has the checksums of all files, manifest.sha256 that of manifest.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from longtail.bundle.errors import BundleCorruptError, BundleVersionError
from longtail.bundle.manifest import SCHEMA_VERSION, FileRecord, Manifest
from longtail.bundle.store import file_sha256

MANIFEST = "manifest.json"
MANIFEST_SHA256 = "manifest.sha256"

_Model = TypeVar("_Model", bound=BaseModel)


def read_manifest(path: Path) -> Manifest:
    """Read manifest.json; raises BundleCorruptError, or BundleVersionError for an unknown schema version."""
    return read_versioned_json(
        path / MANIFEST,
        Manifest,
        SCHEMA_VERSION,
        missing=f"{path}: expected a bundle (a directory with {MANIFEST}), found none",
        remedy="export the model again",
        corrupt=BundleCorruptError,
        unread=BundleVersionError,
        sha256_file=path / MANIFEST_SHA256,
    )


def read_versioned_json(
    file: Path,
    model: type[_Model],
    expected: int,
    *,
    missing: str,
    remedy: str,
    corrupt: type[Exception],
    unread: type[Exception],
    sha256_file: Path | None = None,
) -> _Model:
    """Read a JSON file; checks its schema_version, then its sha256 if a file has it, then the content."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise corrupt(missing) from None
    try:
        # The version first: a file of another version may fail every later check.
        version = json.loads(content)["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise corrupt(f"{file}: expected JSON with a schema_version, found {content[:40]!r}… ({error})") from error
    if version != expected:
        raise unread(
            f"{file}: expected schema version {expected}, found {version!r}: made by another version of Longtail; "
            f"{remedy}"
        )
    if sha256_file is not None:
        try:
            expected_digest = sha256_file.read_text(encoding="utf-8", errors="replace").strip()
        except (FileNotFoundError, IsADirectoryError):
            raise corrupt(f"{sha256_file}: expected the manifest's sha256, found no file") from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != expected_digest:
            raise corrupt(f"{file}: expected sha256 {expected_digest[:80]}, found {digest}")
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"])) or "content"
        raise corrupt(
            f"{file}: {location}: {first['msg']}: damaged, or made by another version of Longtail; {remedy}"
        ) from error


def record_files(root: Path, folder: Path) -> dict[str, FileRecord]:
    """Compute the records of all files below a folder, by path below `root`."""
    return {
        path.relative_to(root).as_posix(): FileRecord(sha256=file_sha256(path), bytes=path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_names(root: Path, files: Iterable[str]) -> None:
    """Check that file names stay below `root`."""
    for name in files:
        # A crafted manifest could otherwise name files elsewhere on this machine.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BundleCorruptError(f"{root}: expected file names below the directory, found {name!r}")


def verify_files(root: Path, files: Mapping[str, FileRecord], *, content: bool = True) -> None:
    """Check every file's size, and with `content` its sha256; raises BundleCorruptError."""
    check_names(root, files)
    for name, record in files.items():
        path = root / name
        if not path.is_file():
            raise BundleCorruptError(f"{path}: expected a file of {record.bytes} bytes, found none")
        # The size first: a file that was cut is noticed without reading it.
        size = path.stat().st_size
        if size != record.bytes:
            raise BundleCorruptError(f"{path}: expected {record.bytes} bytes, found {size}")
        if not content:
            continue
        digest = file_sha256(path)
        if digest != record.sha256:
            raise BundleCorruptError(f"{path}: expected sha256 {record.sha256}, found {digest}")
