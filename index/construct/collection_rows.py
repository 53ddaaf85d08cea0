"""Create, fill and index a collection of a Milvus server.

Legend: `L` labels, `R` some of them, `N` labels of a partition, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Bundle
from longtail.bundle.arrays import Int64
from longtail.bundle.display import json_ready
from longtail.index.construct.recall import Progress
from longtail.index.errors import SpecError
from longtail.index.manifests import CollectionColumn, CollectionRecord
from longtail.index.search.collection import HEAD, TAIL, VECTOR
from longtail.index.search.expressions import BUCKET, ROW
from longtail.index.search.milvus import MilvusServer

if TYPE_CHECKING:
    from pymilvus import MilvusClient

OWN_FIELDS, MOST_FIELDS = 5, 64
"""Fields that every collection has, and that Milvus takes."""
_ROWS_AT_ONCE = 20_000
"""Labels that are made ready at a time."""
_BATCH_BYTES, _FIELD_BYTES = 8 << 20, 16
"""Of one insert, of which Milvus takes 64 MB; and of a field beside its text."""
_LONGEST_TEXT, _MOST_VALUES, _LONGEST_DISPLAY = 65_535, 4_096, 65_536
"""Bytes of a string, strings of a list, and bytes of JSON that Milvus takes."""
_INDEX_SECONDS = 43_200.0
"""The longest that Milvus may take to index a collection."""
_LABEL_ID, _DISPLAY = "label_id", "display"
_MISSING: dict[str, Any] = {
    "varchar": "", "array": [], "bool": False, "int64": 0, "half": 0.0, "float": 0.0, "double": 0.0,
}  # fmt: skip
"""Values that stand where a label has none."""


def write_rows(
    bundle: Bundle, record: CollectionRecord, dim: int, head_N: Int64, server: MilvusServer, progress: Progress
) -> None:
    """Create, fill and index a collection; it is not loaded yet.

    Args:
        bundle: whose augmented rows it gets.
        record: what it is to be.
        dim: coordinates of a row, E.
        head_N: int64, label rows of the partition `head`.
        server: gets it.
        progress: told how far it is, one line at a time.

    Raises:
        SpecError: ids, columns or values that Milvus has no room for.
        EngineUnavailableError: the server does not answer.
    """
    name, labels = record.name, len(bundle.embeddings)
    server.ask(lambda client, seconds: _create(client, record, dim, seconds))
    in_head_L = np.zeros(labels, np.bool_)
    in_head_L[head_N] = True
    for start in range(0, labels, _ROWS_AT_ONCE):
        rows_R = np.arange(start, min(start + _ROWS_AT_ONCE, labels))
        for partition, mask_R in ((HEAD, in_head_L[rows_R]), (TAIL, ~in_head_L[rows_R])):
            where: dict[str, Any] = {"partition_name": partition} if record.head else {}
            for entities in _batches(_entities(bundle, record, rows_R[mask_R])):
                _insert(server, name, entities, where)
        progress(f"{rows_R[-1] + 1:,} of {labels:,} labels written to {name}")
    progress(f"index {name}")
    server.ask(lambda client, seconds: client.flush(name, timeout=seconds), seconds=_INDEX_SECONDS)
    server.ask(lambda client, seconds: _index(client, record, seconds))
    server.wait_until(lambda client, seconds: _is_indexed(client, name, seconds), _INDEX_SECONDS, f"index of {name}")


def _batches(entities: Iterable[tuple[dict[str, Any], int]]) -> Iterator[list[dict[str, Any]]]:
    """Parts of some labels that a request has room for."""
    batch: list[dict[str, Any]] = []
    size = 0
    for entity, own in entities:
        if batch and size + own > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entity)
        size += own
    if batch:
        yield batch


def _insert(server: MilvusServer, name: str, entities: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """Write some labels, each once, although the answer to a first attempt may have been lost."""
    written = False

    def write(client: MilvusClient, seconds: float) -> None:
        nonlocal written
        send, written = (client.upsert if written else client.insert), True
        send(name, entities, timeout=seconds, **where)

    server.ask(write)


def _index(client: MilvusClient, record: CollectionRecord, seconds: float) -> None:
    asked = client.prepare_index_params()
    kind, parameters = ("IVF_FLAT", {"nlist": record.cells}) if record.cells else ("FLAT", {})
    asked.add_index(VECTOR, index_type=kind, metric_type="IP", params=parameters)
    client.create_index(record.name, asked, timeout=seconds, sync=False)


def _is_indexed(client: MilvusClient, name: str, seconds: float) -> bool:
    said = client.describe_index(name, VECTOR, timeout=seconds)
    return said["state"] == "Finished" and int(said["pending_index_rows"]) == 0


def _create(client: MilvusClient, record: CollectionRecord, dim: int, seconds: float) -> None:
    from pymilvus import DataType

    types = {
        "varchar": DataType.VARCHAR, "bool": DataType.BOOL, "int64": DataType.INT64,
        "half": DataType.DOUBLE, "float": DataType.DOUBLE, "double": DataType.DOUBLE,
    }  # fmt: skip
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field(ROW, DataType.INT64, is_primary=True)
    schema.add_field(_LABEL_ID, DataType.VARCHAR, max_length=_LONGEST_TEXT)
    schema.add_field(BUCKET, DataType.INT8)
    schema.add_field(_DISPLAY, DataType.JSON)
    schema.add_field(VECTOR, DataType.FLOAT_VECTOR, dim=dim)
    for column in record.columns:
        if column.type == "array":
            schema.add_field(
                column.field,
                DataType.ARRAY,
                element_type=DataType.VARCHAR,
                max_capacity=_MOST_VALUES,
                max_length=_LONGEST_TEXT,
            )
        else:
            text = {"max_length": _LONGEST_TEXT} if column.type == "varchar" else {}
            schema.add_field(column.field, types[column.type], **text)
        schema.add_field(column.known, DataType.BOOL)
    client.create_collection(record.name, schema=schema, consistency_level="Eventually", timeout=seconds)
    for partition in (HEAD, TAIL) if record.head else ():
        if not client.has_partition(record.name, partition, timeout=seconds):
            client.create_partition(record.name, partition, timeout=seconds)


def _entities(bundle: Bundle, record: CollectionRecord, rows_R: Int64) -> Iterator[tuple[dict[str, Any], int]]:
    """Labels as Milvus takes them, and about how many bytes each has."""
    labels = bundle.labels
    taken = labels.display.take(pa.array(rows_R))
    ids = labels.ids.take(pa.array(rows_R)).to_pylist()
    shown = {name: json_ready(name, taken[name]).to_pylist() for name in taken.column_names}
    values = {column.name: _values(column, taken[column.name]) for column in record.columns}
    for place, (row, id_, bucket, vector_E) in enumerate(
        zip(rows_R.tolist(), ids, labels.buckets[rows_R].tolist(), bundle.rows(rows_R), strict=True)
    ):
        if len(id_.encode()) > _LONGEST_TEXT:
            raise SpecError(f"label {id_[:100]!r}: expected an id of at most {_LONGEST_TEXT:,} bytes")
        display = {name: column[place] for name, column in shown.items()}
        size = len(json.dumps(display, ensure_ascii=False).encode("utf-8", "replace"))
        if size > _LONGEST_DISPLAY:
            raise SpecError(
                f"label {id_[:100]!r}: expected display columns of at most {_LONGEST_DISPLAY:,} bytes as JSON, "
                "received more: train with fewer"
            )
        entity = {
            ROW: row,
            _LABEL_ID: id_,
            BUCKET: bucket,
            _DISPLAY: display,
            VECTOR: vector_E,
        }
        for column in record.columns:
            value = values[column.name][place]
            texts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
            lengths = [len(text.encode()) for text in texts]
            if len(lengths) > _MOST_VALUES or max(lengths, default=0) > _LONGEST_TEXT:
                raise SpecError(
                    f"label {id_[:100]!r}, column {column.name!r}: expected strings of at most {_LONGEST_TEXT:,} "
                    f"bytes, and at most {_MOST_VALUES:,} of them, received more: --filterable leaves columns out"
                )
            entity[column.field] = _MISSING[column.type] if value is None else value
            entity[column.known] = value is not None
            size += sum(lengths)
        yield entity, size + len(id_) + vector_E.nbytes + _FIELD_BYTES * len(entity)


def _values(column: CollectionColumn, whole: pa.ChunkedArray) -> list[Any]:
    """A column's values as the field has them; None where a label has none."""
    if pa.types.is_dictionary(whole.type):
        whole = whole.cast(whole.type.value_type)
    if pa.types.is_date(whole.type) or pa.types.is_timestamp(whole.type):
        whole = pc.cast(pc.cast(whole, pa.timestamp("us"), safe=False), pa.int64())
    elif pa.types.is_decimal(whole.type):
        # By way of their digits, as `serving` compares them.
        whole = pc.cast(pc.cast(whole, pa.string()), pa.float64())
    elif column.type == "int64":
        try:
            whole = pc.cast(whole, pa.int64())
        except pa.ArrowInvalid as error:
            raise SpecError(f"column {column.name!r}: expected integers that int64 holds, {error}") from error
    values: list[Any] = whole.to_pylist()
    if column.type == "array":
        return [
            None if not value or not (known := [text for text in value if text is not None]) else known
            for value in values
        ]
    if column.type in ("half", "float", "double"):
        return [None if value is None or math.isnan(value) else value for value in values]
    return values
