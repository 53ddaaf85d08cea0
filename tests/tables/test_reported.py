"""What public trackers report of other systems: each kind by several examples, through loading, `init` and `check`."""

import datetime
from functools import partial
from pathlib import Path

import pytest

from longtail.trainer.check import check
from longtail.trainer.config import load_recipe
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.errors import DataError
from longtail.trainer.init.recipe import draft_recipe
from tests.trainer import logs

START = 1_767_225_600
ROWS = 300
load = partial(logs.load, query_id="user_id", label_id="product_id")


def clicks(folder: Path, *, item: str = "p{}", ending: str = ".csv", stray: dict[int, str] | None = None) -> Path:
    """Write a log whose column `search` nobody reads."""
    cells = [
        [f"u{at % 60}", item.format(at * 7 % 40), str(START + at * 60), (stray or {}).get(at, "shoes")]
        for at in range(ROWS)
    ]
    delimiter = "\t" if ending == ".tsv" else ","
    lines = [delimiter.join(row) for row in [["user_id", "product_id", "time", "search"], *cells]]
    path = folder / f"clicks{ending}"
    path.write_text("\n".join([*lines, ""]))
    return path


def draft(log: Path, **neighbour: Path) -> str:
    """Return the recipe that `init` writes next to a log."""
    recipe = log.with_name("recipe.toml")
    draft_recipe(log, recipe, **neighbour)
    return recipe.read_text()


STRAYS = {
    "one": {100: '"odd'},
    "two": {100: '"odd', 250: '"odd'},
    "one after the other": {100: '"odd', 101: '"odd'},
    "of which the second closes": {100: '"odd', 200: 'odd"'},
    "in the last row": {ROWS - 1: '"odd'},
    "in the first row": {0: '"'},
    "beside cells quoted whole": {50: '"red, blue"', 100: '"odd', 200: '"red, blue"'},
    "inches": {100: '5" disk', 101: '5"'},
    "in words": {100: '"Weird Al" Yankovic', 200: '"Heroes"'},
}


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
def test_a_stray_quotation_mark_hides_no_row(tmp_path: Path, stray: dict[int, str], ending: str) -> None:
    path = clicks(tmp_path, ending=ending, stray=stray)

    try:
        dataset = load(path)
    except DataError as error:
        assert "clicks" in str(error)  # noqa: PT017 - either is right
        assert ending == ".csv"
    else:
        assert len(dataset.train) == ROWS


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("header", ["user_id,product_id,time", "time,product_id,user_id", "user_id,time,product_id"])
def test_two_stray_quotation_marks_hide_no_row_of_a_narrow_log(tmp_path: Path, header: str, rows: int) -> None:
    path, names = tmp_path / "clicks.csv", header.split(",")
    cells = [{"user_id": f"u{at % 60}", "product_id": f"p{at % 40}", "time": str(START + at)} for at in range(ROWS)]
    cells[5]["product_id"], cells[100]["product_id"], cells[100 + rows]["product_id"] = '"p5"', '"15', '15"'
    path.write_text("\n".join([header, *(",".join(row[name] for name in names) for row in cells), ""]))
    with pytest.raises(DataError, match=r"column 'product_id': expected quotations without rows in them"):
        load(path)


def test_text_of_several_lines_is_no_hidden_row(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    comments = ["Good, but\nslow, too", "Fits\n\nwell", "1, 2\n3, 4", "plain"]
    rows = [f'u{at % 60},"{comments[at % 4]}",p{at % 40},{START + at}' for at in range(ROWS)]
    path.write_text("\n".join(["user_id,comment,product_id,time", *rows, ""]))
    assert len(load(path).train) == ROWS


@pytest.mark.parametrize("order", [("Heroes", '"Weird Al" Yankovic'), ('"Heroes', '"Weird Al" Yankovic')])
def test_a_stray_quotation_mark_hides_no_label(tmp_path: Path, order: tuple[str, str]) -> None:
    labels = tmp_path / "products.tsv"
    titles = {5: order[0], 6: order[1]}
    rows = [f"p{at}\t{titles.get(at, f'thing {at}')}\n" for at in range(40)]
    labels.write_text("product_id\ttitle\n" + "".join(rows))

    dataset = load(clicks(tmp_path), labels=labels)

    assert dataset.label_table is not None
    result = dict(zip(dataset.label_ids.to_pylist(), dataset.label_table["title"].to_pylist(), strict=True))
    assert (result["p5"], result["p6"], result["p7"]) == (*order, "thing 7")


@pytest.mark.parametrize(
    ("log", "listed"),
    [("{}.0", "{}"), ("{}", "{}.0"), ("{}.00", "{}"), ("-{}.0", "-{}"), ("{}", "{}"), ("1{}.0", "1{}.00")],
)
def test_whole_floats_equal_integers(tmp_path: Path, log: str, listed: str) -> None:
    labels = tmp_path / "products.csv"
    labels.write_text("product_id,title\n" + "".join(f"{listed.format(at)},thing {at}\n" for at in range(1, 40)))
    path = clicks(tmp_path, item=log)
    path.write_text(
        "\n".join(line for line in path.read_text().splitlines() if ",0.0" not in line and ",0," not in line)
    )

    dataset = load(path, labels=labels, max_bad_rows=0.05)

    assert dataset.report.unlisted.get("labels", (0, 0))[0] <= 1
    assert len(dataset.label_ids) <= 41


TIMES = {
    "PostgreSQL": "2026-01-{:02} 01:03:49.000000+00",
    "PostgreSQL without fraction": "2026-01-{:02} 01:03:49+00",
    "nanoseconds": "2026-01-{:02}T01:03:49.000000000",
    "nanoseconds of UTC": "2026-01-{:02}T01:03:49.000000000Z",
    ".NET": "2026-01-{:02}T01:03:49.0000000",
    "BigQuery": "2026-01-{:02} 01:03:49 UTC",
    "a blank before the zone": "2026-01-{:02} 01:03:49 +0000",
    "another zone": "2026-01-{:02} 06:33:49+05:30",
    "west": "2026-01-{:02} 00:03:49-01",
}


@pytest.mark.parametrize(
    "time",
    [
        pytest.param(time, id=name, marks=pytest.mark.nightly if at % 2 else ())
        for at, (name, time) in enumerate(TIMES.items())
    ],
)
def test_times_of_databases_are_drafted_and_read(tmp_path: Path, time: str) -> None:
    path = tmp_path / "clicks.csv"
    rows = [f"u{at % 60},p{at * 7 % 40},{time.format(1 + at % 28)}\n" for at in range(ROWS)]
    path.write_text("user_id,product_id,time\n" + "".join(rows))

    dataset = load(path, timestamp="time")

    first = datetime.datetime(2026, 1, 1, 1, 3, 49, tzinfo=datetime.UTC).timestamp() * 1e6
    assert dataset.train.times is not None
    assert sorted(set(dataset.train.times.tolist())) == [first + day * 86_400e6 for day in range(28)]
    assert not dataset.report.dropped
    assert 'strategy = "temporal"' in draft(path)
    # Users choose a few labels again and again.
    assert check(path.with_name("recipe.toml"), overrides=["evaluation.exclude_seen=false"]).problems == []


def test_displayed_texts_equal_the_table(tmp_path: Path) -> None:
    columns = {
        "zip": ["00001", "10115", "1"],
        "sku": ["1E1", "2", "3"],
        "ean": ["4006381333931001234", "4006381333931001235", "40063813339310012345"],
        "plus": ["+49", "1", "2"],
        "wide": ["１２", "1", "2"],
        "in_stock": ["True", "False", ""],
        "released": ["2026-01-02", "", "2026-02-03"],
        "never": ["2026-01-02", "2026-02-30", "2026-02-03"],
        "price": ["9.5", "NA", "10"],
        "count": ["1", "\\N", "3"],
    }
    labels = tmp_path / "products.csv"
    rows = zip(*columns.values(), strict=True)
    labels.write_text(
        f"product_id,{','.join(columns)}\n" + "".join(f"p{at},{','.join(row)}\n" for at, row in enumerate(rows))
    )

    table = load(clicks(tmp_path), labels=labels).label_table

    assert table is not None
    result = {name: table[name].drop_null().to_pylist() for name in columns}
    dates = [datetime.date(2026, 1, 2), datetime.date(2026, 2, 3)]
    typed = {"in_stock": [True, False], "released": dates, "price": [9.5, 10.0], "count": [1, 3]}
    assert {name: sorted(map(str, values)) for name, values in result.items()} == {
        name: sorted(map(str, typed.get(name, texts))) for name, texts in columns.items()
    }


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("note", ['"said\nhi"', '"said, ""hi""\n\nand\n"', '"\n"', '"a,b,c\nd,e,f"', '"u1,p1,5,x\nu2"'])
@pytest.mark.parametrize("rows", [ROWS, pytest.param(60_000, marks=pytest.mark.nightly)])
def test_quoted_line_breaks_are_read_at_any_size(tmp_path: Path, rows: int, note: str, end: str) -> None:
    path = tmp_path / "clicks.csv"
    lines = [f"u{at % 300},p{at % 40},{START + at * 60},{note}" for at in range(rows)]
    path.write_bytes(end.join(["user_id,product_id,time,note", *lines, ""]).encode())

    assert len(load(path, timestamp="time").train) == rows


def test_quoted_line_breaks_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    lines = [f'u{at % 300},p{at % 40},{START + at * 60},"said\nhi"\n' for at in range(60_000)]
    path.write_text("".join(["user_id,product_id,time,note\n", *lines]))

    assert len(load(path, timestamp="time").train) == 60_000


WORDS = ["NA", "\\N", "NaN"]
MORE_WORDS = [
    pytest.param(word, marks=pytest.mark.nightly) for word in ("NULL", "None", "-", "", "null", "n/a", "#N/A")
]


@pytest.mark.parametrize("nothing", [*WORDS, *MORE_WORDS])
def test_missing_words_leave_a_price_numeric(tmp_path: Path, nothing: str) -> None:
    def row(at: int) -> str:
        cells = [f"{at + 0.99}", str(at % 5), f"2026-01-{1 + at % 28:02}"] if at % 20 else [nothing] * 3
        return f"p{at},thing {at} of a kind,{','.join(cells)}\n"

    labels = tmp_path / "products.csv"
    labels.write_text("product_id,title,price,rating,released\n" + "".join(map(row, range(40))))

    recipe = draft(clicks(tmp_path), labels=labels)

    assert '{ name = "price", kind = "number", transform = "quantile"' in recipe
    assert '{ name = "released", kind = "date"' in recipe
    table = load(tmp_path / "clicks.csv", labels=labels).label_table
    assert table is not None
    assert [str(table[name].type) for name in ("price", "rating", "released")] == ["double", "int64", "date32[day]"]
    assert table["price"].null_count == table["rating"].null_count == 2


def test_check_and_load_count_the_same_rows(tmp_path: Path) -> None:
    path = clicks(tmp_path)
    lines = path.read_text().splitlines()
    lines[7], lines[19] = "u1,p1", "u1,p1,oops,x"
    path.write_text("\n".join([*lines, ""]))
    recipe = tmp_path / "recipe.toml"
    draft(clicks(tmp_path))
    path.write_text("\n".join([*lines, ""]))
    settings = ["data.max_bad_rows=2", "evaluation.exclude_seen=false"]

    looked = check(recipe, overrides=settings)
    report = load_dataset(load_recipe(recipe, settings).data, seed=0).report

    assert (report.read, report.dropped) == (ROWS, 2)
    assert looked.ok
    assert looked.rows[0].startswith(f"Left out, of {ROWS} rows read: 2 by bad rows")
    assert not check(recipe, overrides=[settings[0], "data.max_bad_rows=1"]).ok
