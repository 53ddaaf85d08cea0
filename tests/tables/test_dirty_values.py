"""Values of all types that files hold are read exactly, or not at all."""

import datetime
import decimal
import json
import math
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, strategies as st

from longtail.tables.database import Database
from longtail.tables.values import TEXT, text_types, to_micros, to_number, typed
from longtail.trainer.errors import DataError
from tests.tables.dirty import CASES, cases, read
from tests.trainer.logs import load

EPOCH = datetime.datetime(1970, 1, 1)


def evaluate(reader: Database, expression: str, text: str) -> Any:
    return reader.connection.execute(f"SELECT {expression} FROM (SELECT ?::VARCHAR AS x)", [text]).fetchall()[0][0]


@st.composite
def times(draw: st.DrawFn) -> tuple[str, int]:
    """Draw a time as a database prints it, and its microseconds since 1970."""
    time = draw(st.datetimes(datetime.datetime(1, 1, 3), datetime.datetime(9999, 12, 28)))
    digits = draw(st.integers(0, 9))
    fraction = f"{time.microsecond:06}000"[:digits]
    zone = draw(st.sampled_from(["", "Z", " UTC", "+00", "+0000", "+00:00", "-00", "+05:30", "-0330", "+15:45", "-08"]))
    blank = "" if zone == " UTC" else draw(st.sampled_from(["", " "]))
    text = f"{time:%H:%M:%S}{'.' if digits else ''}{fraction}{blank}{zone}"
    text = f"{time.year:04}-{time:%m-%d}{draw(st.sampled_from('T '))}{text}"
    number = zone.strip("ZUTC ").replace(":", "").ljust(5, "0") if zone.strip("ZUTC ") else "+0000"
    offset = int(number[0] + "1") * (int(number[1:3]) * 60 + int(number[3:5])) * 60_000_000
    exact = time.replace(microsecond=int(fraction[:6].ljust(6, "0")))
    return text, (exact - EPOCH) // datetime.timedelta(microseconds=1) - offset


@pytest.mark.parametrize("count", CASES)
def test_times_of_databases_are_parsed(count: int, reader: Database) -> None:
    @cases(count)
    @given(times())
    def check(time: tuple[str, int]) -> None:
        text, micros = time

        assert evaluate(reader, str(to_micros("x", TEXT)), text) == micros

    check()


@pytest.mark.parametrize("count", CASES)
def test_broken_times_and_numbers_are_null(count: int, reader: Database) -> None:
    """A text near one is read as Python reads it, or not at all."""
    near = st.sampled_from(["2026-01-02 03:04:05", "2026-01-02T03:04:05.678Z", "2026-01-02", "-12.5e3", "1_000", "inf"])
    letters = st.sampled_from([*"0123456789-:. TZ+,eE_x/", "\n", "１", "٣", "−", "\x00", "\xa0"])

    @cases(count)
    @given(near, st.lists(st.tuples(st.integers(0, 24), letters, st.booleans()), max_size=3))
    def check(text: str, changes: list[tuple[int, str, bool]]) -> None:
        for at, letter, replaces in changes:
            text = text[:at] + letter + text[at + replaces :]
        micros = evaluate(reader, str(to_micros("x", TEXT)), text)
        number = evaluate(reader, str(to_number("x", TEXT)), text)

        if micros is not None:
            spoken = text.strip().replace("Z", "+00:00").replace(" +", "+").replace(" -", "-")
            present = datetime.datetime.fromisoformat(spoken)
            present = present if present.tzinfo is None else present.astimezone(datetime.UTC).replace(tzinfo=None)
            assert micros == (present - EPOCH) // datetime.timedelta(microseconds=1)
        assert number is None or (number == float(text) and "_" not in text)

    check()


@pytest.mark.parametrize("count", CASES)
def test_text_column_gets_a_fitting_type(count: int, reader: Database) -> None:
    """Codes with leading zeros, exponents, a plus or more digits than a type tells apart stay text."""
    number = st.one_of(
        st.integers(-(2**70), 2**70).map(str),
        st.floats(allow_nan=False, allow_infinity=False).map(str),
        st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
        st.from_regex(r"\A[ \n]?[+-]?[0-9]{1,20}(\.[0-9]{0,3})?[ \n]?\Z"),
        st.sampled_from(["True", "false ", "TRUE\n", "2026-02-28", "2026-02-29", "0000-01-01", "1E1", "0x1", "t"]),
    )

    @cases(count)
    @given(number)
    @example("100000000000000.01")
    @example("1700000000123.456")
    def check(text: str) -> None:
        for kind, condition in text_types("x").items():
            if not evaluate(reader, condition, text):
                continue
            result, plain = evaluate(reader, typed("x", kind), text), text.strip()
            assert result is not None
            if kind == "BIGINT":
                assert result == int(text)
                assert str(result) == plain or plain == "-0"
            elif kind == "DOUBLE":
                assert result == float(text)
                assert decimal.Decimal(plain) == round(
                    decimal.Decimal(result), -decimal.Decimal(plain).as_tuple().exponent
                )
            elif kind == "BOOLEAN":
                assert str(result).lower() == plain.lower()
            elif kind == "DATE":
                assert result.isoformat() == plain

    check()


D = decimal.Decimal
MOMENT = 1_767_225_600
PARQUET: dict[str, tuple[pa.Array, list[object]]] = {
    "text": (pa.array(["x", None, "007"]), ["x", None, "007"]),
    "large text": (pa.array(["x", None, "é"], pa.large_string()), ["x", None, "é"]),
    "view": (pa.array(["x", None, "é"], pa.string_view()), ["x", None, "é"]),
    "dictionary": (pa.array(["x", None, "x"]).dictionary_encode(), ["x", None, "x"]),
    "decimal": (pa.array([D("1.50"), None, D(-2)], pa.decimal128(10, 2)), [D("1.50"), None, D("-2.00")]),
    "wide decimal": (pa.array([D(10**37)], pa.decimal128(38, 0)), [D(10**37)]),
    "uint64": (pa.array([2**64 - 1, 0, None], pa.uint64()), [2**64 - 1, 0, None]),
    "int8": (pa.array([-128, 127], pa.int8()), [-128, 127]),
    "half": (pa.array(np.array([1.5, 65504], np.float16)), [1.5, 65504.0]),
    "float": (pa.array([0.5, None, math.inf], pa.float32()), [0.5, None, math.inf]),
    "boolean": (pa.array([True, None, False]), [True, None, False]),
    "nothing": (pa.nulls(2), [None, None]),
    "seconds": (pa.array([MOMENT], pa.timestamp("s")), [datetime.datetime(2026, 1, 1)]),
    "date": (pa.array([20454], pa.date32()), [datetime.date(2026, 1, 1)]),
    "fixed lists": (pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)), [[1.0, 2.0], [3.0, 4.0]]),
    "nested lists": (pa.array([[["x"], []], None, []]), [[["x"], []], None, []]),
    "binary": (pa.array([b"x", b"\xff", None]), [b"x", b"\xff", None]),
    "map": (pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int32())), [[("x", 1)], None]),
}  # fmt: skip


@pytest.mark.parametrize("column", PARQUET.values(), ids=PARQUET)
def test_parquet_keeps_types(tmp_path: Path, reader: Database, column: tuple[pa.Array, list[object]]) -> None:
    array, values = column
    table = pa.table([array, pa.array(range(len(array)))], names=["Id", "id"])
    pq.write_table(table, tmp_path / "t.parquet")

    result = read(reader, tmp_path / "t.parquet")

    assert result.refused is None
    assert result.rows == list(zip(values, range(len(array)), strict=True))


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_parquet_are_cut_to_microseconds(tmp_path: Path, unit: str, zone: str | None) -> None:
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    times = [(MOMENT + 5) * scale + 789 % scale, (MOMENT + 9) * scale - 1]
    table = pa.table({"user": ["u", "v"], "item": ["a", "b"], "time": pa.array(times, pa.timestamp(unit, zone))})
    pq.write_table(table, tmp_path / "t.parquet")

    dataset = load(tmp_path / "t.parquet", timestamp="time")

    assert dataset.train.times is not None
    assert dataset.train.times.tolist() == [time * 10**6 // scale for time in times]


IDS: dict[str, pa.Array] = {
    "int64": pa.array([39, 7, 12]),
    "uint64": pa.array([39, 7, 12], pa.uint64()),
    "text": pa.array(["39", "7", "12"]),
    "whole floats in text": pa.array(["39.0", "7", "12.0"]),
    "floats": pa.array([39.0, 7.0, 12.0]),
    "float32": pa.array([39.0, 7.0, 12.0], pa.float32()),
    "halves": pa.array(np.array([39, 7, 12], np.float16)),
    "decimals": pa.array([D(39), D(7), D(12)], pa.decimal128(38, 0)),
    "decimals with zeros": pa.array([D("39.00"), D(7), D(12)], pa.decimal128(10, 2)),
    "binary text": pa.array([b"39", b"7", b"12"]),
    "fixed binary": pa.array([b"39", b"07", b"12"], pa.binary(2)),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_ids_of_all_types_are_equal(tmp_path: Path, ids: pa.Array) -> None:
    pq.write_table(pa.table({"user": ["u1", "u2", "u1"], "item": ids}), tmp_path / "t.parquet")

    assert load(tmp_path / "t.parquet").label_ids.to_pylist() == ["39", "07" if ids.type == pa.binary(2) else "7", "12"]


NO_IDS: dict[str, pa.Array] = {
    "fractions": pa.array([1.5, 2.0]),
    "what floats cannot tell apart": pa.array([2.0**53, 1.0]),
    "what float32 cannot tell apart": pa.array([2.0**24, 1.0], pa.float32()),
    "fractions of decimals": pa.array([D("1.50"), D(1)], pa.decimal128(10, 2)),
    "infinity": pa.array([math.inf, 1.0]),
    "no text": pa.array([b"\xff\xfe", b"a"]),
    "lists": pa.array([["a"], ["b"]]),
    "times": pa.array([MOMENT, MOMENT], pa.timestamp("s")),
}


@pytest.mark.parametrize("ids", NO_IDS.values(), ids=NO_IDS)
def test_invalid_ids_are_refused(tmp_path: Path, ids: pa.Array) -> None:
    pq.write_table(pa.table({"user": ["u1", "u2"], "item": ids}), tmp_path / "t.parquet")

    with pytest.raises(DataError, match=r"t\.parquet: column 'item': expected ids as strings or integers"):
        load(tmp_path / "t.parquet")


TEXTS = ["01-02-2026", "26-01-02", "2026-01-02", "2026-01-02T01:02:03+05:30", "01:02:03", "007", "1e5", "true", "",
         "x\ny", str(uuid.UUID(int=5)).upper(), "2026-01-02 01:02:03 PM"]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_json_stay_texts(tmp_path: Path, reader: Database, text: str) -> None:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"a": text, "b": [text]}) + "\n" for _ in range(3)))

    assert read(reader, tmp_path / "t.jsonl").rows == [(text, [text])] * 3
