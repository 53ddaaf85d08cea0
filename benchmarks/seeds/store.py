"""Records of runs: a small file per run during a study, then one compressed table per study for the repository."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.seeds.study import POPULARITY, SEEDS, Method, Study
from longtail.bundle.arrays import Float64
from longtail.bundle.store import replace_file


@dataclass
class Record:
    """Hold the record of one trained model, or of the popularity row.

    Attributes:
        choice: values of the method's grid by key.
        protocol: digest of all settings; records of another protocol are not used.
        valid, bias_removal: the validation metric at the best λ, and this λ.
        seconds: CPU time of training.
        test: metrics on test by λ; {} for a run of the search only.
        values: `metric@λ` → packed contributions of every test query, whose mean is the metric.
    """

    study: str
    method: str
    choice: dict[str, float]
    seed: int
    protocol: str
    valid: float
    bias_removal: float
    seconds: float
    labels: int
    pairs: int
    test: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the name of the record within its study."""
        return key_of(self.method, self.choice, self.seed)


def key_of(method: str, choice: dict[str, float], seed: int) -> str:
    """Format a key such as `uniform tail | optimizer.embedding_learning_rate = 0.01 | seed 0`."""
    return " | ".join([method, *(f"{key} = {value:g}" for key, value in choice.items()), f"seed {seed}"])


def protocol_of(study: Study, method: Method) -> str:
    """Compute a digest of all settings of a method's runs, without choice and seed."""
    settings = [
        dict(study.settings), dict(method.settings), study.epochs, study.hold_out, study.max_pairs,
        study.choose_by, study.grid, study.show, study.compare, False,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def by_every_seed(method: str, records: Iterable[Record]) -> list[Record]:
    """Return a method's test records by seed; empty before all seeds are measured, except for popularity."""
    mine = sorted((it for it in records if it.method == method and it.test), key=lambda it: it.seed)
    return mine if method == POPULARITY or [it.seed for it in mine] == list(SEEDS) else []


class Store:
    """Store records of the studies: packed records, and newer records in files of their own.

    Args:
        fresh: folder with one file per run, which processes may share.
        packed: folder with one table per study.
    """

    def __init__(self, fresh: Path, packed: Path) -> None:
        self.fresh, self.packed = fresh, packed

    def records(self, study: Study) -> dict[str, Record]:
        """Return the records of a study with its present protocol, by key."""
        protocols = {(method.name, protocol_of(study, method)) for method in study.methods}
        return {it.key: it for it in self._all(study) if (it.method, it.protocol) in protocols}

    def _all(self, study: Study) -> list[Record]:
        path = self.packed / f"{study.name}.parquet"
        rows = pq.read_table(path).to_pylist(maps_as_pydicts="strict") if path.exists() else []
        records = [
            json.loads(row["record"]) | {"values": {at: _text(v) for at, v in row["values"].items()}} for row in rows
        ]
        records += [
            json.loads(path.read_text(encoding="utf-8")) for path in sorted((self.fresh / study.name).glob("*.json"))
        ]
        names = {field.name for field in fields(Record)}  # older records have more fields
        return [Record(**{name: value for name, value in it.items() if name in names}) for it in records]

    def put(self, record: Record) -> None:
        """Write a record atomically."""
        folder = self.fresh / record.study
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(record.key.encode()).hexdigest()[:16]
        replace_file(folder / f"{name}.json", json.dumps(asdict(record)).encode())

    def pack(self, study: Study, read: Mapping[str, Set[str]]) -> None:
        """Write all records of a study into one table, with the values that findings `read`.

        Only methods with all seeds keep values.
        """
        records = [it for _, it in sorted(self.records(study).items())]
        if not records:
            return
        complete = {method.name for method in study.methods if by_every_seed(method.name, records)}
        self.packed.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "record": json.dumps(asdict(it) | {"values": {}}),
                "values": [
                    (at, _bytes(text))
                    for at, text in sorted(it.values.items())
                    if it.method not in complete or at in read.get(it.key, ())
                ],
            }
            for it in records
        ]
        schema = pa.schema([("record", pa.string()), ("values", pa.map_(pa.string(), pa.binary()))])
        table = pa.Table.from_pylist(rows, schema)
        pq.write_table(
            table, self.packed / f"{study.name}.parquet", compression="zstd", compression_level=22,
            use_dictionary=False, data_page_size=1 << 24,
        )  # fmt: skip


def pack_values(values_N: Float64) -> str:
    """Encode float16 values of every query as text."""
    return _text(values_N.astype(np.float16).tobytes())


def unpack_values(text: str) -> Float64:
    """Decode packed values, float64 [N]."""
    return np.frombuffer(_bytes(text), np.float16).astype(np.float64)


def _text(values: bytes) -> str:
    return base64.b85encode(zlib.compress(values, 9)).decode()


def _bytes(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))
