"""The label table as a file that is mapped: what was written, and no memory of its own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import BundleCorruptError, Labels
from tests.bundles import make_bundle

DISPLAY = pa.table(
    {
        "title": pa.array(["a", None, "ü" * 40] * 20),
        "price": pa.array([1.5, float("nan"), None] * 20),
        "tags": pa.array([["x", "y"], [], None] * 20),
        "brand": pa.array(["b", "c", "b"] * 20).dictionary_encode(),
    }
)


def mappable(path: Path, display: pa.Table = DISPLAY) -> Labels:
    labels = replace(make_bundle(labels=60, bias=True).labels, display=display)
    labels.write(path)
    return labels


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_the_mapped_table_is_the_table(tmp_path: Path, kind: pa.DataType) -> None:
    written = mappable(tmp_path / "labels.arrow", DISPLAY)
    written = replace(written, ids=written.ids.cast(kind))
    written.write(tmp_path / "labels.arrow")
    allocated = pa.total_allocated_bytes()
    mapped = Labels.read(tmp_path / "labels.arrow")
    assert not mapped.rows_by_id.order.flags.owndata
    assert pa.total_allocated_bytes() == allocated
    assert mapped.ids.equals(written.ids)
    for name in ("counts", "log_pn", "buckets", "bias"):
        array = getattr(mapped, name)
        assert array.dtype == getattr(written, name).dtype
        assert np.array_equal(array, getattr(written, name))
    assert mapped.log_popularity is None is written.log_popularity
    assert mapped.display.schema == written.display.schema
    assert repr(mapped.display.to_pydict()) == repr(written.display.to_pydict())  # NaN is no NaN's equal
    assert (mapped.rows_by_id["item-7"], mapped.rows_by_id.get("x")) == (7, None)


def test_derived_labels_have_their_own_id_rows(tmp_path: Path) -> None:
    mappable(tmp_path / "labels.arrow")
    renamed = replace(Labels.read(tmp_path / "labels.arrow"), ids=pa.array([f"other-{row}" for row in range(60)]))
    assert (renamed.rows_by_id.get("item-7"), renamed.rows_by_id["other-7"]) == (None, 7)


@pytest.mark.parametrize("content", [b"", b"PAR1 of another kind", None], ids=["empty", "another", "cut"])
def test_other_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "labels.arrow"
    mappable(path, DISPLAY.select(["title"]))
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    with pytest.raises(BundleCorruptError, match=r"labels.arrow: expected an Arrow file"):
        Labels.read(path)


def test_text_offsets_beyond_the_file_are_refused(tmp_path: Path) -> None:
    """A search would read there, and end the process."""
    path = tmp_path / "labels.arrow"
    table = pa.table({"label_id": ["seven", "letters"]})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    offsets, beyond = (np.array([0, 5, end], np.int32).tobytes() for end in (12, 1 << 30))
    assert path.read_bytes().count(offsets) == 1
    path.write_bytes(path.read_bytes().replace(offsets, beyond))
    with pytest.raises(BundleCorruptError, match=r"labels.arrow: expected an Arrow file"):
        Labels.read(tmp_path / "labels.arrow")
