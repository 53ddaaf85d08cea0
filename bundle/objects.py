"""Read and write objects below a URL such as `s3://bucket/folder`: S3, Google Cloud Storage and Azure, by obstore.

Keys, regions and endpoints come from the environment, such as the AWS_… variables, from AWS's credentials file, or from
the machine's own role.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.manifest import FileRecord
from longtail.extras import pip_install

_CLIENT: Any = {"allow_http": True, "connect_timeout": "5s", "read_timeout": "20s", "timeout": "60s"}
_RETRIES: Any = {"max_retries": 3, "retry_timeout": timedelta(seconds=60)}
_BLOCK = 1 << 23
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.+")
_NO_BUCKET = ("NoSuchBucket", "bucket does not exist", "ContainerNotFound")

Tag = dict[str, str]
"""Version of an object's content, for conditional writes."""


def is_url(source: str | Path) -> bool:
    """Return whether a source is at an object store: a URL other than `file://`."""
    return isinstance(source, str) and _URL.fullmatch(source) is not None and not source.startswith("file://")


def local_path(path: str | Path) -> Path:
    """Convert a local path or `file://` URL to a `Path`."""
    if isinstance(path, str) and path.startswith("file://"):
        return Path(url2pathname(path.removeprefix("file://").removeprefix("localhost")))
    return Path(path)


def check_scheme(url: str) -> None:
    """Refuse a URL with an unsupported scheme."""
    if url.partition("://")[0].lower() not in _SCHEMES:
        raise ObjectStoreError(f"{url}: expected s3://, gs:// or az://, as releases and bundles are at object stores")


def store_options(url: str) -> dict[str, Any]:
    """Return obstore's options for a URL: limits, and keys of AWS's credentials file, which obstore does not read."""
    options: dict[str, Any] = {"client_options": _CLIENT, "retry_config": _RETRIES}
    if url.startswith(("s3://", "s3a://")) and "AWS_ACCESS_KEY_ID" not in os.environ:
        file = configparser.ConfigParser()
        file.read(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or Path.home() / ".aws" / "credentials")
        profile = os.environ.get("AWS_PROFILE", "default")
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        options["config"] = {name: file[profile][name] for name in names if file.has_option(profile, name)}
    return options


class ObjectStore:
    """The objects below a URL. Methods raise ObjectStoreError if the store does not answer or refuses."""

    def __init__(self, url: str) -> None:
        check_scheme(url)
        self.url = url.rstrip("/")
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError as error:
            raise ObjectStoreError(f"{url}: expected the extra `remote`, {pip_install('remote')}: {error}") from error
        self._api, self._errors = obstore, exceptions
        with self._asking("open it"):
            self._store = store.from_url(self.url, **store_options(self.url))

    def read(self, path: str) -> bytes | None:
        """Get the content of a small object; None if there is none."""
        content = self.read_version(path)
        return None if content is None else content[0]

    def read_version(self, path: str) -> tuple[bytes, Tag] | None:
        """Get the content of a small object with its tag, for `put`; None if there is none."""
        with suppress(FileNotFoundError), self._asking(f"read {path}"):
            result = self._api.get(self._store, path)
            meta: Any = result.meta
            return bytes(result.bytes()), {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}
        return None

    def put(self, path: str, content: bytes, tag: Tag | None = None) -> bool:
        """Write a small object if it is new or has a known tag; returns whether it succeeded.

        If several writers try at once, exactly one succeeds. After a lost response the object's content decides.
        """
        refused = (self._errors.AlreadyExistsError, self._errors.PreconditionError, FileNotFoundError)
        try:
            with self._asking(f"write {path}"):
                mode: Any = tag or "create"
                self._api.put(self._store, path, content, mode=mode)
        except (*refused, ObjectStoreError) as error:
            # After a lost response the retry is refused by the object that the first attempt wrote.
            same = self.read(path) == content
            if not same and isinstance(error, ObjectStoreError):
                raise
            return same
        return True

    def list(self) -> dict[str, datetime]:
        """List objects by path, with their times of writing."""
        with self._asking("list"):
            objects = [item for part in self._api.list(self._store) for item in part]
        return {item["path"]: item["last_modified"] for item in sorted(objects, key=lambda item: item["path"])}

    def upload(self, file: Path, path: str) -> None:
        """Write a file as an object, replacing an existing one; raises OSError if the file cannot be read."""
        with self._asking(f"write {path}"):
            self._api.put(self._store, path, file)

    def download(self, path: str, record: FileRecord, file: Path) -> None:
        """Write an object to a file; raises ObjectStoreError unless size and checksum match the record."""
        digest = hashlib.sha256()
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("wb") as target, self._asking(f"read {path}"):
                # In blocks: a lost connection repeats 8 MiB, and memory stays small.
                for start in range(0, record.bytes, _BLOCK):
                    end = min(start + _BLOCK, record.bytes)
                    block = self._api.get_range(self._store, path, start=start, end=end)
                    digest.update(block)
                    target.write(block)
        except FileNotFoundError:
            raise ObjectStoreError(f"{self.url}/{path}: expected an object, found none") from None
        if digest.hexdigest() != record.sha256:
            raise ObjectStoreError(
                f"{self.url}/{path}: expected sha256 {record.sha256}, received bytes of {digest.hexdigest()}"
            )

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects in order; missing ones count as deleted."""
        for path in paths:
            with suppress(FileNotFoundError), self._asking(f"delete {path}"):
                self._api.delete(self._store, path)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Translate obstore's errors into ObjectStoreError, except failed conditions and missing objects."""
        try:
            yield
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise
        except (self._errors.BaseError, FileNotFoundError) as error:
            # A missing bucket is an error, although obstore reports it like a missing object.
            if isinstance(error, FileNotFoundError) and not any(word in str(error) for word in _NO_BUCKET):
                raise
            line = " ".join(str(error).split("\n\nDebug source", maxsplit=1)[0].split()) or type(error).__name__
            raise ObjectStoreError(f"{self.url}: expected a store that answers, could not {what}: {line}") from error
