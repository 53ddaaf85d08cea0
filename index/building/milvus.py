"""Write a bundle's rows to a collection of a Milvus server, and measure its recall.

Every build creates a new collection, whose name holds the time when the build began. A release names the collection
only when it is complete and its recall suffices; collections of interrupted builds stay unnamed and are dropped later.

Legend: `L` labels, `R` some of them, `N` labels of a partition, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Bundle
from longtail.bundle.arrays import Int64
from longtail.bundle.display import json_ready
from longtail.bundle.filterable import filter_kind
from longtail.index.building.training import order_by_max_score
from longtail.index.building.tuning import TARGET, TunedIndex
from longtail.index.errors import LongtailIndexError, SpecError
from longtail.index.manifests import CollectionColumn, CollectionRecord, Kind, SearchParams, Trial
from longtail.index.recall import Calibration, Progress, all_dial_points, check_floor
from longtail.index.search.exact import ExactRows
from longtail.index.search.milvus_searcher import (
    BUCKET,
    HEAD,
    ROW,
    TAIL,
    VECTOR,
    Collection,
    MilvusSearcher,
    drop_collections,
)
from longtail.index.search.milvus_server import MilvusServer
from longtail.index.spec import IndexSpec

if TYPE_CHECKING:
    from pymilvus import MilvusClient

OWN_FIELDS, MOST_FIELDS = 5, 64
"""Number of fields that every collection has, and the largest number that Milvus allows."""
_ROWS_AT_ONCE = 20_000
"""Labels whose entities are prepared at a time."""
_BATCH_BYTES, _FIELD_BYTES = 8 << 20, 16
"""Size of one insert, well below Milvus's limit of 64 MB, and the estimated overhead of one field."""
_LONGEST_TEXT, _MOST_VALUES, _LONGEST_DISPLAY = 65_535, 4_096, 65_536
"""Milvus's limits: bytes of a string, strings of a list, and bytes of a JSON value."""
_INDEX_SECONDS = 43_200.0
"""The longest that Milvus may take to index a collection."""
_LABEL_ID, _DISPLAY = "label_id", "display"
_MISSING: dict[str, Any] = {
    "varchar": "", "array": [], "bool": False, "int64": 0, "half": 0.0, "float": 0.0, "double": 0.0,
}  # fmt: skip
"""Placeholders for labels without a value, by the type of the field."""


def write_rows(
    bundle: Bundle, record: CollectionRecord, dim: int, head_N: Int64, server: MilvusServer, progress: Progress
) -> None:
    """Create, fill and index a collection without loading it.

    The label rows `head_N`, int64, go to the partition `head`.
    """
    name, labels = record.name, len(bundle.embeddings)
    server.ask(lambda client, seconds: _create(client, record, dim, seconds))
    in_head_L = np.zeros(labels, np.bool_)
    in_head_L[head_N] = True
    for start in range(0, labels, _ROWS_AT_ONCE):
        rows_R = np.arange(start, min(start + _ROWS_AT_ONCE, labels))
        for partition, mask_R in ((HEAD, in_head_L[rows_R]), (TAIL, ~in_head_L[rows_R])):
            partition_options: dict[str, Any] = {"partition_name": partition} if record.head else {}
            for entities in _batches(_entities(bundle, record, rows_R[mask_R])):
                _insert(server, name, entities, partition_options)
        progress(f"{rows_R[-1] + 1:,} of {labels:,} labels written to {name}")
    progress(f"index {name}")
    server.ask(lambda client, seconds: client.flush(name, timeout=seconds), seconds=_INDEX_SECONDS)
    server.ask(lambda client, seconds: _index(client, record, seconds))
    server.wait_until(lambda client, seconds: _is_indexed(client, name, seconds), _INDEX_SECONDS, f"index of {name}")


def _batches(entities: Iterable[tuple[dict[str, Any], int]]) -> Iterator[list[dict[str, Any]]]:
    """Group entities, given with their sizes in bytes, into batches that one request can hold."""
    batch: list[dict[str, Any]] = []
    size = 0
    for entity, entity_bytes in entities:
        if batch and size + entity_bytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entity)
        size += entity_bytes
    if batch:
        yield batch


def _insert(server: MilvusServer, name: str, entities: list[dict[str, Any]], partition_options: dict[str, Any]) -> None:
    """Insert labels exactly once, even if the answer to a first attempt was lost."""
    written = False

    def write(client: MilvusClient, seconds: float) -> None:
        nonlocal written
        # A failed insert may have arrived: the retry overwrites by primary key instead of adding rows twice.
        send, written = (client.upsert if written else client.insert), True
        send(name, entities, timeout=seconds, **partition_options)

    server.ask(write)


def _index(client: MilvusClient, record: CollectionRecord, seconds: float) -> None:
    index_params = client.prepare_index_params()
    kind, parameters = ("IVF_FLAT", {"nlist": record.lists}) if record.lists else ("FLAT", {})
    index_params.add_index(VECTOR, index_type=kind, metric_type="IP", params=parameters)
    client.create_index(record.name, index_params, timeout=seconds, sync=False)


def _is_indexed(client: MilvusClient, name: str, seconds: float) -> bool:
    description = client.describe_index(name, VECTOR, timeout=seconds)
    return description["state"] == "Finished" and int(description["pending_index_rows"]) == 0


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
        schema.add_field(column.presence_field, DataType.BOOL)
    # Rows do not change after the build, so a search need not wait for later writes.
    client.create_collection(record.name, schema=schema, consistency_level="Eventually", timeout=seconds)
    for partition in (HEAD, TAIL) if record.head else ():
        # A retry after a lost answer finds what the first attempt created.
        if not client.has_partition(record.name, partition, timeout=seconds):
            client.create_partition(record.name, partition, timeout=seconds)


def _entities(bundle: Bundle, record: CollectionRecord, rows_R: Int64) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield labels as Milvus entities, each with its approximate size in bytes."""
    labels = bundle.labels
    display_rows = labels.display.take(pa.array(rows_R))
    ids = labels.ids.take(pa.array(rows_R)).to_pylist()
    display_values = {name: json_ready(name, display_rows[name]).to_pylist() for name in display_rows.column_names}
    values = {column.name: _values(column, display_rows[column.name]) for column in record.columns}
    for i, (row, id_, bucket, vector_E) in enumerate(
        zip(rows_R.tolist(), ids, labels.buckets[rows_R].tolist(), bundle.rows(rows_R), strict=True)
    ):
        if len(id_.encode()) > _LONGEST_TEXT:
            raise SpecError(f"label {id_[:100]!r}: expected an id of at most {_LONGEST_TEXT:,} bytes")
        display = {name: column[i] for name, column in display_values.items()}
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
            value = values[column.name][i]
            texts = value if isinstance(value, list) else [value] if isinstance(value, str) else []
            lengths = [len(text.encode()) for text in texts]
            if len(lengths) > _MOST_VALUES or max(lengths, default=0) > _LONGEST_TEXT:
                raise SpecError(
                    f"label {id_[:100]!r}, column {column.name!r}: expected strings of at most {_LONGEST_TEXT:,} "
                    f"bytes, and at most {_MOST_VALUES:,} of them, received more: --filterable leaves columns out"
                )
            entity[column.field] = _MISSING[column.type] if value is None else value
            entity[column.presence_field] = value is not None
            size += sum(lengths)
        yield entity, size + len(id_) + vector_E.nbytes + _FIELD_BYTES * len(entity)


def _values(column: CollectionColumn, chunks: pa.ChunkedArray) -> list[Any]:
    """Convert a column's values to the type of its field; None where a label has no value."""
    if pa.types.is_dictionary(chunks.type):
        chunks = chunks.cast(chunks.type.value_type)
    if pa.types.is_date(chunks.type) or pa.types.is_timestamp(chunks.type):
        chunks = pc.cast(pc.cast(chunks, pa.timestamp("us"), safe=False), pa.int64())
    elif pa.types.is_decimal(chunks.type):
        # Through their decimal digits: `serving` compares the same float64 numbers.
        chunks = pc.cast(pc.cast(chunks, pa.string()), pa.float64())
    elif column.type == "int64":
        try:
            chunks = pc.cast(chunks, pa.int64())
        except pa.ArrowInvalid as error:
            raise SpecError(f"column {column.name!r}: expected integers that int64 holds, {error}") from error
    values: list[Any] = chunks.to_pylist()
    if column.type == "array":
        return [
            None if not value or not (texts := [text for text in value if text is not None]) else texts
            for value in values
        ]
    if column.type in ("half", "float", "double"):
        return [None if value is None or math.isnan(value) else value for value in values]
    return values


_LEAST_ROWS = 1_024
"""Fewest rows of a segment that Milvus indexes; Milvus searches a smaller segment approximately at every `nprobe`."""
_HEAD_SHARE, _MOST_HEAD = 0.01, 65_536
"""Share and largest number of the labels in the partition `head`."""
_SEGMENT_ROWS = 250_000
"""Approximate rows of a segment when Milvus seals it. Every segment has its own lists; merged segments keep the same
number of lists."""
_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REMEDY = "Use --spec milvus_flat"


def tune_collection(
    bundle: Bundle, spec: IndexSpec, server: MilvusServer, filterable: Sequence[str] | None, progress: Progress
) -> TunedIndex:
    """Write a bundle's rows to a collection, and find the least `nprobe` with sufficient recall.

    Only a part of the rows is in memory at a time.
    """
    started = time.perf_counter()
    labels, kind = len(bundle.embeddings), spec.kind(len(bundle.embeddings))
    least = _LEAST_ROWS if kind == "milvus_flat" else 2 * _LEAST_ROWS
    if labels < least:
        raise SpecError(f"{kind}: expected at least {least:,} labels, received {labels:,}; use --spec flat")
    progress(f"exact answers for the recall of {kind} over {labels:,} labels")
    calibration = Calibration(bundle, None, dial_points=all_dial_points(bundle))
    dim = ExactRows(bundle).dim
    record = _record(bundle, kind, filterable, server)
    try:
        head_N = order_by_max_score(bundle, None, calibration)[: record.head] if record.head else np.empty(0, np.int64)
        write_rows(bundle, record, dim, np.sort(head_N), server, progress)
        trials = _trials(bundle, Collection(server, record), calibration, progress, spec)
    except BaseException:
        with suppress(LongtailIndexError):  # the first error is the one to report
            drop_collections(server.reconnected(), [record.name])
        raise
    chosen = max(trials, key=lambda trial: trial.lowest.recall)
    return TunedIndex(
        kind=kind,
        dim=dim,
        index=None,
        chosen=chosen,
        trials=trials,
        recall_k=calibration.k,
        recall_queries=calibration.queries,
        recall=chosen.recall,
        seconds=time.perf_counter() - started,
        collection=record,
    )


def _record(bundle: Bundle, kind: Kind, filterable: Sequence[str] | None, server: MilvusServer) -> CollectionRecord:
    """Decide head size, number of lists, and columns of a new collection; raises SpecError."""
    labels, display = len(bundle.embeddings), bundle.labels.display
    head = lists = 0
    if kind == "milvus_ivf_flat":
        head = min(max(round(_HEAD_SHARE * labels), _LEAST_ROWS), _MOST_HEAD)
        lists = max(1, round(4 * math.sqrt(min(labels - head, _SEGMENT_ROWS))))
    names = display.column_names if filterable is None else filterable
    columns = [
        CollectionColumn(name=name, field=f"value_{i}", presence_field=f"known_{i}", type=type_)
        for i, name in enumerate(names)
        if (type_ := _field_type(display.schema.field(name).type)) is not None
    ]
    if OWN_FIELDS + 2 * len(columns) > MOST_FIELDS:
        raise SpecError(
            f"expected at most {(MOST_FIELDS - OWN_FIELDS) // 2} display columns to filter by, as Milvus has "
            f"{MOST_FIELDS} fields and a column takes two, received {len(columns)}: --filterable says which"
        )
    name = f"longtail_{int(time.time())}_{uuid4().hex[:8]}"
    return CollectionRecord(name=name, head=head, lists=lists, columns=columns, server=server.version())


def _field_type(type_: pa.DataType) -> Any:
    """Return the type of a column's field; None for a column that filters do not support."""
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    match filter_kind(type_):
        case "string":
            return "varchar"
        case "strings":
            return "array"
        case "boolean":
            return "bool"
        case "date":
            return "int64"
        case "number":
            if pa.types.is_integer(plain):
                return "int64"
            return {16: "half", 32: "float"}.get(plain.bit_width, "double") if pa.types.is_floating(plain) else "double"
    return None


def _trials(
    bundle: Bundle, collection: Collection, calibration: Calibration, progress: Progress, spec: IndexSpec
) -> list[Trial]:
    """Try numbers of lists, least first, until recall suffices."""
    record = collection.record
    collection.open(len(bundle.embeddings), ExactRows(bundle).dim)
    searcher, target = MilvusSearcher(bundle, collection, SearchParams()), max(TARGET, spec.recall_floor)
    tried = [nprobe for nprobe in _PROBES if nprobe < record.lists] if record.lists else []
    trials = []
    for nprobe in [*tried, max(1, record.lists)]:
        params = SearchParams(nprobe=nprobe)
        recall, rate = calibration.measure(searcher.with_params(params))
        trials.append(
            Trial(
                kind=spec.kind(len(bundle.embeddings)),
                params=params,
                recall=recall,
                queries_per_second=round(rate, 1),
            )
        )
        progress(f"{params.words}: lowest recall {trials[-1].lowest.recall:.4f}")
        if trials[-1].lowest.recall >= target:
            break
    best = max(trials, key=lambda trial: trial.lowest.recall)
    check_floor(best.lowest, spec, calibration, len(trials), _REMEDY)
    return trials
