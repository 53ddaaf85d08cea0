"""Objects below a URL such as `s3://bucket/folder`, by fsspec: read, created once, uploaded, downloaded, deleted.

What a URL's file system needs of keys, endpoints and proxies it takes from where its own client looks, such as the
AWS_… variables. No call waits for ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.request import url2pathname

from longtail.bundle.errors import StorageError

_SECONDS = 60.0
"""For a call, and for blocks of a file that are read at once."""
_CONNECT_SECONDS, _READ_SECONDS = 5, 20
_BLOCK = 1 << 22
_BLOCKS_AT_ONCE = 4
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")
_THERE_ALREADY = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
"""What S3's servers call an object that is there, or being written, and must not be; not all say what s3fs expects."""

_Answer = TypeVar("_Answer")


def is_url(place: str | Path) -> bool:
    """Whether a place is at an object store: a URL, and none of `file://`."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None and not place.startswith("file://")


def local_path(place: str | Path) -> Path:
    """The path of a place that is none, of a `file://` URL too."""
    if isinstance(place, str) and place.startswith("file://"):
        return Path(url2pathname(place.removeprefix("file://").removeprefix("localhost")))
    return Path(place)


class ObjectStore:
    """The objects below a URL.

    Args:
        url: of a folder, there or not: `s3://bucket/folder`, `gs://…`, whatever fsspec has a file system for.

    Raises:
        StorageError: fsspec, or what it needs for this URL, is not installed; or it is no such URL.
    """

    def __init__(self, url: str) -> None:
        if not is_url(url):
            raise StorageError(f"expected the URL of an object store, such as s3://bucket/folder, received {url}")
        self.url = url.rstrip("/") if url.rstrip("/").count("/") > 1 else url
        try:
            import fsspec.asyn
        except ImportError as error:
            raise StorageError(
                f"{url}: expected the extra `remote`, pip install 'longtail[remote]': {error}"
            ) from error
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        s3 = url.startswith(("s3://", "s3a://"))
        # Of an object that is read whole, s3fs asks for its size first if it may read parts of it at once.
        options: dict[str, Any] = {"config_kwargs": limits, "max_concurrency": 1} if s3 else {}
        self._at_once = {"max_concurrency": _BLOCKS_AT_ONCE} if s3 else {}
        try:
            self._system, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        # A file system's client raises what it likes.
        except Exception as error:
            raise StorageError(f"{url}: expected a URL that fsspec can open: {_line(error)}") from error
        self._asynchronous = isinstance(self._system, fsspec.asyn.AsyncFileSystem)

    def read(self, path: str) -> bytes | None:
        """The content of a small object; None if there is none.

        Raises:
            StorageError: the store does not answer, or there is no such bucket.
        """
        try:
            content: bytes = self._call(f"read {path}", self._system.cat_file, self._path(path))
        except FileNotFoundError:
            return None
        return content

    def create(self, path: str, content: bytes) -> bool:
        """Write a small object that is not there yet, in one step; whether it is now this one's content.

        Of several that try at once one does, and of a store whose answer was lost the content tells.

        Raises:
            StorageError: the store does not answer; whether it is there then is open.
        """
        try:
            self._call(f"create {path}", self._system.pipe_file, self._path(path), content, mode="create")
        except FileExistsError:
            return self.read(path) == content
        return True

    def refuses_to_replace(self, path: str) -> bool:
        """Whether the store keeps `create` from an object that is there: some know nothing of it, and overwrite.

        Raises:
            StorageError: the store does not answer.
        """
        content = self.read(path) or b""
        try:
            self._call(f"create {path}", self._system.pipe_file, self._path(path), content, mode="create")
        except FileExistsError:
            return True
        return False

    def folders(self) -> list[str]:
        """Names of the folders at the top, sorted.

        Raises:
            StorageError: the store does not answer.
        """
        return sorted(PurePosixPath(each["name"]).name for each in self._listed("") if each["type"] == "directory")

    def files(self, path: str) -> list[str]:
        """Names of the objects right in a folder, sorted; raises StorageError as `folders`."""
        return sorted(PurePosixPath(each["name"]).name for each in self._listed(path) if each["type"] == "file")

    def below(self, path: str) -> list[str]:
        """Every object below a folder, by its path here, sorted.

        Raises:
            StorageError: the store does not answer.
        """
        try:
            found = self._call(f"list {path}", self._system.find, self._path(path))
        except FileNotFoundError:
            return []
        return sorted(str(PurePosixPath(each).relative_to(PurePosixPath(self._root))) for each in found)

    def written_at(self, path: str) -> datetime:
        """When an object was written, by the store's clock.

        Raises:
            FileNotFoundError: there is none.
            StorageError: the store does not answer.
        """
        at: datetime = self._call(f"look at {path}", self._system.modified, self._path(path), seconds=None)
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)

    def upload(self, file: Path, path: str) -> None:
        """Write a file as an object, over one that may be there.

        Raises:
            StorageError: the store does not answer, or refuses.
            OSError: the file cannot be read.
        """
        seconds = _SECONDS * (1 + file.stat().st_size / _BLOCK)
        write = partial(self._system.put_file, **self._at_once)
        self._call(f"write {path}", write, str(file), self._path(path), seconds=seconds)

    def download(self, path: str, file: Path, size: int) -> None:
        """Write an object's first `size` bytes as a file, some blocks of it at a time.

        Raises:
            StorageError: the store does not answer, or there is no such object, or a shorter one.
            OSError: the disk is full, or not writable.
        """
        at_once = _BLOCK * _BLOCKS_AT_ONCE
        with file.open("wb") as target:
            for start in range(0, size, at_once):
                starts = list(range(start, min(start + at_once, size), _BLOCK))
                ends = [min(each + _BLOCK, size) for each in starts]
                paths = [self._path(path)] * len(starts)
                try:
                    read = partial(self._system.cat_ranges, on_error="raise")
                    blocks = self._call(f"read {path}", read, paths, starts, ends)
                except FileNotFoundError:
                    raise StorageError(f"{self.url}/{path}: expected an object of {size} bytes, found none") from None
                if (received := sum(map(len, blocks))) != ends[-1] - start:
                    raise StorageError(
                        f"{self.url}/{path}: expected {size} bytes, received {received} of the {ends[-1] - start} "
                        f"at {start}"
                    )
                target.writelines(blocks)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, one after the other; those that are gone are.

        Raises:
            StorageError: the store does not answer, or refuses; some are deleted then.
        """
        for path in paths:
            try:
                self._call(f"delete {path}", self._system.rm_file, self._path(path))
            except FileNotFoundError:
                continue

    def _listed(self, path: str) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = self._call(f"list {path}", self._system.ls, self._path(path), detail=True)
        except FileNotFoundError:
            return []
        return found

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    def _call(
        self, what: str, function: Callable[..., _Answer], *given: Any, seconds: float | None = 0.0, **options: Any
    ) -> _Answer:
        """Call a method of the file system for so many seconds at most, `_SECONDS` if 0; None: one without a limit."""
        within = {"timeout": seconds or _SECONDS} if self._asynchronous and seconds is not None else {}
        try:
            return function(*given, **options, **within)
        except FileExistsError:
            raise
        # A file system's client raises what it likes.
        except Exception as error:
            code = _code(error)
            if code in _THERE_ALREADY:
                raise FileExistsError(f"{self.url}: could not {what}") from error
            # Without a bucket, or from what is no such store, everything is missing.
            if isinstance(error, FileNotFoundError) and code in (None, "NoSuchKey"):
                raise
            raise StorageError(
                f"{self.url}: expected a store that answers, could not {what.strip()}: {_line(error)}"
            ) from error


def _code(error: Exception) -> str | None:
    """What the server called an error, as botocore has it."""
    said = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    return said.get("Error", {}).get("Code") if isinstance(said, dict) else None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()) or 'no answer in time'}"
