"""Dirty rows, repeats, event types, ages: what becomes of each row of a log."""

import gzip
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from longtail.trainer.config import DataConfig
from longtail.trainer.errors import DataError
from tests.trainer.logs import load, name_pairs, write_table, write_text

NOW = int(datetime(2025, 6, 1, tzinfo=UTC).timestamp())


DIRTY = f"""user,item,when,much
a,1,{NOW},1
,2,{NOW},1
c,,{NOW},1
undefined,3,{NOW},1
e,4,soon,1
f,5,{NOW}000,1
g,6,12,1
h,7,{NOW},-1
i,8,{NOW},inf
j,9,{NOW},a lot
k,10,{NOW},2
l,11,{NOW},3
m,12,{NOW},4
n,13,{NOW},4
o,14,{NOW},4
p,15,{NOW},4
q,16,{NOW},4
r,17,{NOW},4
"""
SETTINGS = {"timestamp": "when", "weight": "much"}


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write_text(tmp_path / "log.csv", DIRTY)
    other = write_text(tmp_path / "other.csv", "user,item\na,b\n")

    with pytest.raises(DataError) as refused:
        load(path, test=other, valid=tmp_path / "gone.csv", placeholders=["undefined"], **SETTINGS)

    head, *lines = str(refused.value).split("\n")
    assert head == "data with 10 problems; data.max_bad_rows = 0.05 leaves out such rows, up to 5 % of those read:"
    assert [line.replace(f"{tmp_path}/", "").strip() for line in lines] == [
        "gone.csv: expected a csv file, found none",
        "other.csv: expected a column 'when', found user, item",
        "log.csv: column 'user': expected an id in every row, found null in row 1",
        "log.csv: column 'user': expected an id in every row, found 'undefined' in row 3",
        "log.csv: column 'item': expected an id in every row, found null in row 2",
        "log.csv: column 'when': expected numbers or timestamps, found 'soon' in row 4",
        "log.csv: column 'when': expected seconds as in most rows, found milliseconds "
        f"({NOW}000, 2025-06-01 00:00) in row 5",
        "log.csv: column 'when': expected times since 1990 and not in the future, found 1970-01-01 00:00 in row 6",
        "log.csv: column 'much': expected numbers, found 'inf' in 2 rows (8, 9)",
        "log.csv: column 'much': expected weights >= 0, found -1.0 in row 7",
    ]


def test_bad_rows_are_dropped_counted_and_listed(tmp_path: Path) -> None:
    path = write_text(tmp_path / "log.csv", DIRTY)

    dataset = load(path, max_bad_rows=9, **SETTINGS)

    assert sorted(name_pairs(dataset)) == sorted(
        ["a-1", "undefined-3", *(f"{user}-{at}" for at, user in enumerate("klmnopqr", 10))]
    )
    assert "4" not in dataset.label_ids.to_pylist()
    report = dataset.report
    assert (report.read, report.dropped, report.unit) == (18, 8, "seconds")
    assert sum(problem.count for problem in report.problems if problem.fatal) == 8
    lines = "\n".join(report.lines())
    assert "Left out, of 18 rows read: 8 by bad rows" in lines
    assert "found milliseconds (" in lines
    assert "2025-06-01 00:00) in row 5" in lines
    assert "expected times since 1990 and not in the future, found 1970-01-01 00:00 in row 6" in lines
    assert "Doubtful: " in lines
    assert "found 'undefined', which looks like a placeholder (data.placeholders) in row 3" in lines


@pytest.mark.parametrize(("limit", "words"), [(7, "at most 7"), (0.4, "at most 0.4 of 18 rows")])
def test_too_many_bad_rows_are_refused(tmp_path: Path, limit: float, words: str) -> None:
    path = write_text(tmp_path / "log.csv", DIRTY)

    with pytest.raises(DataError, match=f"data.max_bad_rows: expected {words}, found 8 bad rows:\n"):
        load(path, max_bad_rows=limit, **SETTINGS)
    assert len(load(path, max_bad_rows=8 if isinstance(limit, int) else 0.5, **SETTINGS).train) == 10


def test_impossible_times_are_bad_rows(tmp_path: Path) -> None:
    times = [NOW, NOW + 1, NOW + 2, NOW * 1000, 0]
    path = write_table(tmp_path / "log.parquet", user=list("abcde"), item=[1, 1, 1, 1, 1], when=times)

    with pytest.raises(DataError) as refused:
        load(path, timestamp="when")
    assert "expected seconds as in most rows, found milliseconds (1748736000000, 2025-06-01 00:00) in row 3" in str(
        refused.value
    )
    assert "expected times since 1990 and not in the future, found 1970-01-01 00:00 in row 4" in str(refused.value)
    dataset = load(path, timestamp="when", max_bad_rows=2)
    assert dataset.train.times.tolist() == times[:3]


def test_units_are_found_file_by_file(tmp_path: Path) -> None:
    units = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6, "nanoseconds": 10**9}
    paths = [
        write_table(
            tmp_path / f"{unit}.parquet", user=["a"] * 2, item=[unit, unit], when=[(NOW + at) * scale, NOW * scale]
        )
        for at, (unit, scale) in enumerate(units.items())
    ]
    days = write_table(
        tmp_path / "days.parquet", user=["a"], item=["days"], when=[datetime.fromtimestamp(NOW + 9, UTC)]
    )
    order = write_table(tmp_path / "order.parquet", user=["a", "b"], item=["x", "x"], when=[1, 2])

    dataset = load([*paths, days], timestamp="when")

    assert sorted(dataset.train.times.tolist()) == [*[NOW] * 5, NOW + 1, NOW + 2, NOW + 3, NOW + 9]
    assert dataset.report.unit == "seconds"
    assert load(paths[2:], timestamp="when").report.unit == "microseconds"
    with pytest.raises(DataError, match=r"order\.parquet: column 'when': expected times since 1990"):
        load([*paths, order], timestamp="when")
    with pytest.raises(DataError, match=r"since 1970 in .*order\.parquet, as there are dates in .*days\.parquet"):
        load([days, order], timestamp="when")


def test_versions_may_have_another_unit(tmp_path: Path) -> None:
    log = write_table(tmp_path / "log.parquet", user=["a", "a"], item=[1, 2], when=[NOW, NOW + 100])
    users = write_table(
        tmp_path / "users.parquet", user=["a", "a"], since=[0, (NOW + 50) * 1000], plan=["free", "paid"]
    )
    more = write_table(
        tmp_path / "more.parquet", user=["b", "b"], since=[NOW * 1000, NOW * 1000 - 5], plan=["free", "paid"]
    )

    dataset = load(log, timestamp="when", queries=[users, more], valid_from="since")

    assert dataset.query_table is not None
    assert dataset.requests is not None
    plans = dataset.query_table["plan"].to_pylist()
    assert [plans[row] for row in dataset.requests.attributes[dataset.train.requests]] == ["free", "paid"]


def test_files_without_rows_are_named(tmp_path: Path) -> None:
    for name, content in {
        "a.csv": "user,item\na,x\n", "b.csv": "", "c.csv": "\ufeff", "d.jsonl": "", "f.csv": "user,item\n",
        "g.csv.gz": gzip.compress(b""),
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    write_table(tmp_path / "e.parquet", user=pa.nulls(0), item=pa.nulls(0))

    dataset = load(tmp_path)

    assert sorted(name_pairs(dataset)) == ["a-x"]
    assert dataset.report.lines() == [f"Without rows: {tmp_path}/b.csv and 4 more"]
    with pytest.raises(DataError, match=r"b\.csv: expected a header with the names of columns, found an empty file"):
        load(tmp_path / "b.csv")


def test_empty_id_column_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "log.parquet", user=["a", "b"], item=pa.nulls(2), when=pa.nulls(2))

    with pytest.raises(DataError, match=r"(?s)'item': expected an id in every row, found null in 2 rows \(0, 1\)"):
        load(path)


@pytest.mark.parametrize(
    "times",
    [
        [date(2025, 1, 2), date(2025, 1, 1)],
        [datetime(2025, 1, 2, tzinfo=UTC), datetime(2025, 1, 1, tzinfo=UTC)],
        ["2025-01-02T00:00:00Z", "2025-01-01T01:00:00+01:00"],
        ["2025-01-02", "2025-01-01 00:00:00"],
        pa.array([1735776000_000000001, 1735689600_000000000], pa.timestamp("ns")),
    ],
    ids=["dates", "timestamps", "text with a zone", "text", "nanoseconds"],
)
def test_times_in_every_form(tmp_path: Path, times: Any) -> None:
    dataset = load(write_table(tmp_path / "log.parquet", user=["a", "b"], item=[1, 1], when=times), timestamp="when")

    assert dataset.train.times.tolist() == [1735776000e6, 1735689600e6]
    assert dataset.report.unit == "microseconds"


def test_bad_rows_of_feature_tables(tmp_path: Path) -> None:
    log = write_table(tmp_path / "log.parquet", user=["a", "b"], item=["x", "y"])
    items = write_table(tmp_path / "items.parquet", item=["x", None, "", "y", "x", "x"], price=[1, 2, 3, 4, 5, 6])

    with pytest.raises(DataError, match="distinct ids, found 'x' a second time in row 4, and 1 more such rows"):
        load(log, labels=items)
    dataset = load(log, labels=items, max_bad_rows=4)

    assert dict(zip(dataset.label_ids.to_pylist(), dataset.label_table["price"].to_pylist(), strict=True)) == {
        "x": 1,
        "y": 4,
    }
    assert dataset.report.dropped == 4


def test_repeats_are_dropped_within_each_split(tmp_path: Path) -> None:
    train = write_table(
        tmp_path / "log.parquet", user=list("aabab"), item=[1, 2, 1, 1, 1], when=[1, 2, 3, 4, 5], much=[5.0, 1, 1, 2, 3]
    )
    valid = write_table(tmp_path / "valid.parquet", user=["a", "a"], item=[2, 2], when=[6, 7], much=[1.0, 1])
    settings = {"valid": valid, "timestamp": "when", "weight": "much"}

    repeated, dropped = load(train, **settings), load(train, **settings, repeats="drop")

    assert (len(repeated.train), len(repeated.valid)) == (5, 2)
    assert sorted(name_pairs(dropped)) == ["a-1", "a-2", "b-1"]
    assert dropped.train.times.tolist() == [2, 4, 5]
    assert dropped.train.weights.tolist() == [1, 5, 3]
    assert (len(dropped.valid), dropped.report.repeats) == (1, 3)
    assert (len(repeated.refit().train), len(dropped.refit().train)) == (7, 3)


EVENTS = {"column": "event", "weights": {"view": 1, "cart": 3, "buy": 10, "hover": 0}}


def events(folder: Path, *names: str | None) -> Path:
    days = [datetime(2025, 1, 1, tzinfo=UTC) + timedelta(days=day) for day in range(len(names))]
    return write_table(
        folder / "log.parquet", user=list("abcdefgh")[: len(names)], item=[1] * len(names), event=list(names), when=days
    )


def test_event_types_of_weight_0_are_left_out(tmp_path: Path) -> None:
    dataset = load(events(tmp_path, "view", "hover", "buy", "cart"), events=EVENTS)

    assert sorted(name_pairs(dataset)) == ["a-1", "c-1", "d-1"]
    assert dataset.train.weights.tolist() == [1, 10, 3]
    assert dataset.report.unweighted == 1


def test_an_event_type_without_a_weight_is_a_bad_row(tmp_path: Path) -> None:
    path = events(tmp_path, "view", "wish", "share", "wish", None, "buy")

    with pytest.raises(DataError) as refused:
        load(path, events=EVENTS)
    expected = "expected one of view, cart, buy, hover (weight 0 leaves a type out)"
    assert f"{expected}, found 'wish' (2), 'share' (1), null in 4 rows (1, 2, 3, 4)" in str(refused.value)
    assert name_pairs(load(path, events=EVENTS, max_bad_rows=4)) == ["a-1", "f-1"]


@pytest.mark.parametrize(
    ("since", "users"),
    [("2d", "bcd"), ("36h", "cd"), ("2025-01-03", "cd"), ("2025-01-03T01:00:00+02:00", "cd"), ("2025-01-04", "d")],
)
def test_rows_since_a_time(tmp_path: Path, since: str, users: str) -> None:
    dataset = load(events(tmp_path, *["view"] * 4), timestamp="when", since=since)

    assert sorted(name_pairs(dataset)) == [f"{user}-1" for user in users]
    assert dataset.report.early == 4 - len(users)
    assert dataset.query_ids.to_pylist() == list(users)


REFUSED = {
    "no sources": ({"train": []}, r"expected at least one path or URL, received \[\]"),
    "a number": ({"train": 7}, "expected a path or a URL, or a list of them, received 7"),
    "no span": ({"timestamp": "when", "since": "soon"}, "expected a span such as '30d' or a time"),
    "no time": ({"since": "30d"}, "expected data.timestamp with it, received none"),
    "weights of nothing": ({"events": {"weights": {"view": 1}}}, "events.column"),
    "no weights": ({"events": {"column": "e", "weights": {}}}, "events.weights"),
    "only zeros": ({"events": {"column": "e", "weights": {"view": 0}}}, "expected some weight > 0"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_data_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate({"train": "a.parquet"} | changes)


def test_spans_need_real_times(tmp_path: Path) -> None:
    path = write_table(tmp_path / "log.parquet", user=["a", "b"], item=[1, 1], when=[1, 2])

    with pytest.raises(DataError, match=r"expected data.timestamp as dates, or as seconds, .* found other numbers in"):
        load(path, timestamp="when", since="30d")


def test_frequencies_count_weighted_pairs_and_counts_count_pairs(tmp_path: Path) -> None:
    path = write_table(tmp_path / "log.parquet", user=["a", "a", "b"], item=[1, 2, 1], much=[2.0, 0.5, 1])

    dataset = load(path, weight="much")

    assert dataset.label_counts().tolist() == [2, 1]
    assert dataset.label_visits(one_label_per_query=False).tolist() == [2, 1]
    assert dataset.label_visits(one_label_per_query=False, weighted=True).tolist() == [3, 0.5]
    assert dataset.label_visits(one_label_per_query=True, weighted=True).tolist() == [2, 0.25]


def test_whole_floats_in_text_are_integer_ids(tmp_path: Path) -> None:
    log = write_text(tmp_path / "log.csv", "user,item\n1.0,39.0\n2,40\n1,39\n")
    items = write_table(tmp_path / "items.parquet", item=[39, 40, 41], price=[1.0, 2.0, 3.0])
    dataset = load(log, labels=items)
    assert sorted(name_pairs(dataset)) == ["1-39", "1-39", "2-40"]
    assert dataset.label_ids.to_pylist() == ["39", "40", "41"]
    assert dataset.label_table["price"].to_pylist() == [1, 2, 3]
    assert not dataset.report.unlisted


def test_mixed_ids_stay_text_and_lookalikes_are_named(tmp_path: Path) -> None:
    log = write_text(tmp_path / "log.csv", "user,item\na,39.0\nb,x1\n")
    items = write_table(tmp_path / "items.parquet", item=["39", "x1"])
    dataset = load(log, labels=items)
    assert dataset.label_ids.to_pylist() == ["39.0", "x1", "39"]
    (line,) = dataset.report.lines()
    assert line == (
        "Without a row in data.labels: 1 of the 2 labels in interactions, such as '39.0', where it has '39'"
    )


def test_two_spellings_of_one_id_are_refused(tmp_path: Path) -> None:
    items = write_text(tmp_path / "items.csv", "item,price\n39,1\n39.0,2\n")
    with pytest.raises(DataError, match="expected distinct ids, found '39' a second time in row 1"):
        load(write_table(tmp_path / "log.parquet", user=[1], item=[39]), labels=items)


def test_bad_feature_rows_are_numbered_as_in_the_file(tmp_path: Path) -> None:
    log = write_table(tmp_path / "log.parquet", user=["a"], item=["x"])
    (tmp_path / "items").mkdir()
    write_text(tmp_path / "items/1.csv", "item,price\n,0\nw,1\nx,2\n")
    write_text(tmp_path / "items/2.csv", "item,price\ny,3\nz,4,5\n,6\nx,7\n")
    with pytest.raises(DataError) as refused:
        load(log, labels=tmp_path / "items")
    assert "2.csv: column 'item': expected distinct ids, found 'x' a second time in row 3" in str(refused.value)
    assert "2.csv: expected 2 columns, found 3 in line 3" in str(refused.value)
