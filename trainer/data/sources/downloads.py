"""Downloads of raw files with checksums and a cache."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtail.bundle.store import atomic_directory, file_sha256
from longtail.trainer.errors import DataError

_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Download:
    """Describe a file that a source offers for download.

    Attributes:
        name: name of the stored file; `.zip` files are unpacked.
        sha256: the file's SHA-256, in hex; None if the publisher's file is not pinned and counts are checked instead.
    """

    url: str
    name: str
    sha256: str | None = None


@dataclass(frozen=True)
class Wheel:
    """Describe a data set inside a wheel, pinned as `name==version`."""

    requirement: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """Describe a publisher of a data set: the files to download, and a web page.

    Attributes:
        files: files to download, or a wheel.
        by_hand: page of the files in a browser, for the error after a failed download.
    """

    name: str
    files: tuple[Download, ...] | Wheel
    by_hand: str


def fetch(name: str, sources: Sequence[Source], *, say: Callable[[str], object]) -> Path:
    """Return the directory of a data set's raw files, downloaded if needed."""
    base = os.environ.get("XDG_CACHE_HOME")
    cached = (Path(base) if base else Path.home() / ".cache") / "longtail" / name
    if cached.is_dir():
        return cached
    problems = []
    for source in sources:
        say(f"Fetching {name} from {source.name} …")
        try:
            with atomic_directory(cached) as working:
                if isinstance(source.files, Wheel):
                    _fetch_wheel(source.files, working)
                else:
                    for download in source.files:
                        _download(download, working)
            return cached
        except (
            DataError,
            urllib.error.URLError,
            http.client.HTTPException,
            ConnectionError,
            TimeoutError,
            subprocess.SubprocessError,
            zipfile.BadZipFile,
        ) as error:
            problems.append(f"{source.name}: {error}")
    pages = "; ".join(source.by_hand for source in sources)
    raise DataError(
        f"{name}: expected one of {len(sources)} sources to answer, none did ({' | '.join(problems)}). "
        f"Get it by hand ({pages}) and pass its directory with --from"
    )


def unpacked(source: str | Path, folder: Path) -> Path:
    """Return a directory of raw files: `source` itself, or `folder` with the files of a zip or URL."""
    if "://" in str(source):
        try:
            _download(Download(str(source), "files.zip"), folder)
        except (OSError, http.client.HTTPException, zipfile.BadZipFile) as error:
            raise DataError(f"--from {source}: expected a zip to download: {error}") from error
        return folder
    if zipfile.is_zipfile(source):
        _unpack(Path(source), folder)
        return folder
    if not Path(source).is_dir():
        raise DataError(f"--from {source}: expected a directory or a zip, found none")
    return Path(source)


def listing(folder: Path) -> str:
    """Return the first ten names in a directory, for errors."""
    return ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"


def _download(download: Download, folder: Path) -> None:
    target = folder / download.name
    with urllib.request.urlopen(download.url, timeout=_TIMEOUT_SECONDS) as answer, target.open("wb") as file:
        while chunk := answer.read(1 << 20):
            file.write(chunk)
    _check(target, download.sha256)
    if target.suffix == ".zip":
        _unpack(target, folder)


def _fetch_wheel(wheel: Wheel, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        child = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, wheel.requirement],
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        wheels = list(Path(scratch).glob("*.whl"))
        if child.returncode != 0 or not wheels:
            reason = (child.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise DataError(f"pip download {wheel.requirement}: {reason}")
        _check(wheels[0], wheel.sha256)
        _unpack(wheels[0], folder)


def _check(path: Path, sha256: str | None) -> None:
    if sha256 is not None and (digest := file_sha256(path)) != sha256:
        raise DataError(f"{path.name}: expected sha256 {sha256}, found {digest}")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive's files flat into `folder`; the known data sets have no two files of the same name."""
    with zipfile.ZipFile(archive) as contents:
        for entry in contents.infolist():
            if not entry.is_dir():
                # The last part of a name alone, so that no entry can leave the folder.
                (folder / Path(entry.filename).name).write_bytes(contents.read(entry))
