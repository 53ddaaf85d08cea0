"""Reads `labels.log`, the file of label changes before there was a database of them.

    longtail-labels 1 3f0c…               format version, and a name that every rewriting changed
    9d1f2a04 1 {"op":"upsert","id":"a",…}  crc32 of all after it, records of the batch still to come, the record
    7b00c3de 0 {"op":"hide","id":"b",…}    … 0: the batch is whole

A batch at the end that is not whole was never acknowledged.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from longtail.bundle import LabelRecord, read_record
from longtail.state.errors import StoreCorruptError, StoreVersionError

OLD_LOG = "labels.log"
_MAGIC, _VERSION = "longtail-labels", "1"


def read_old_log(path: Path) -> list[LabelRecord]:
    """All records of whole batches.

    Raises:
        StoreCorruptError: a line is not what was written.
        StoreVersionError: of a version that there never was.
        OSError: it cannot be read.
    """
    head, newline, content = path.read_bytes().partition(b"\n")
    words = head.decode("ascii", "replace").split(" ")
    if not newline or words[0] != _MAGIC or len(words) < 2 or not words[1].isdigit():
        raise _corrupt(path, 1, f"{_MAGIC} {_VERSION}", repr(head[:40]))
    if words[1] != _VERSION:
        raise StoreVersionError(f"{path}: version {words[1]}, this installation reads {_VERSION}: upgrade Longtail")
    records: list[LabelRecord] = []
    batch: list[LabelRecord] = []
    expected = 0
    for number, line in enumerate(content.split(b"\n")[:-1], 2):
        crc, _, rest = line.partition(b" ")
        if crc != b"%08x" % zlib.crc32(rest):
            raise _corrupt(path, number, f"crc32 {zlib.crc32(rest):08x} of the rest of the line", repr(crc[:20]))
        left, _, record = rest.partition(b" ")
        try:
            batch.append(read_record(record))
            to_come = int(left)
        except ValueError as error:
            raise _corrupt(path, number, "an upsert, hide or restore", str(error)) from error
        if len(batch) > 1 and to_come != expected:
            raise _corrupt(path, number, f"{expected} more records of the batch", f"{to_come}")
        expected = to_come - 1
        if to_come == 0:
            records += batch
            batch = []
    return records


def _corrupt(path: Path, line: int, expected: str, found: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"{path}, line {line}: expected {expected}, found {found}; restore the file, or cut it before this line and "
        "lose what follows"
    )
