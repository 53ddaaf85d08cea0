"""`longtail-train init`: what it makes of columns, and that `fit` takes what it writes as it is."""

from __future__ import annotations

import datetime
import decimal
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from longtail.bundle.display import DisplayColumns
from longtail.bundle.filterable import check_filterable
from longtail.serving.core.attributes import LabelAttributes
from longtail.trainer.check import check
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.data.ids import describe_example
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.init.columns import profile_column
from longtail.trainer.init.events import rejects
from longtail.trainer.init.recipe import draft_recipe
from tests.trainer import tiny
from tests.trainer.test_cli import run

START = datetime.datetime(2026, 1, 1)


def shop(folder: Path, *, ending: str = "parquet") -> Path:
    """A shop's log with events and devices, and its products and customers."""
    rng = np.random.default_rng(5)
    log = tiny.clustered(users=40, items=30, per_user=12, seed=1)
    rows = len(log)
    clicks = {
        "visitorId": [f"c{user}" for user in log["user_id"].to_pylist()],
        "sku": [f"p-{item}" for item in log["item_id"].to_pylist()],
        "clicked_at": [START + datetime.timedelta(minutes=int(minute)) for minute in log["timestamp"].to_pylist()],
        "event_type": rng.choice(["view", "add_to_cart", "purchase"], rows, p=[0.8, 0.15, 0.05]).tolist(),
        "device": rng.choice(["phone", "desktop"], rows).tolist(),
    }
    products = {
        "sku": [f"p-{item}" for item in range(32)],
        "product title": [f"The {['red', 'blue', 'green'][item % 3]} chair number {item}" for item in range(32)],
        "price": [None if item == 3 else 9.5 + item for item in range(32)],
        "brand": [f"brand{item % 5}" for item in range(32)],
        "tags": ["wood|home" if item % 2 else "steel" for item in range(32)],
        "image": [f"http://shop/{item}.png" for item in range(32)],
        "in_stock": [True] * 32,
        "device": [f"d{item % 4}" for item in range(32)],
    }
    customers = {
        "visitorId": [f"c{user}" for user in range(40)],
        "country": [["DE", "FR", "NL"][user % 3] for user in range(40)],
        "device": [["a", "b"][user % 2] for user in range(40)],
        "age": [20 + user for user in range(40)],
    }
    for name, columns in (("clicks", clicks), ("products", products), ("customers", customers)):
        path = folder / f"{name}.{ending}"
        if ending == "parquet":
            pq.write_table(pa.table(columns), path)
        else:
            options = pyarrow.csv.WriteOptions(delimiter="," if ending == "csv" else "\t")
            pyarrow.csv.write_csv(pa.table(columns), path, options)
    return folder / f"clicks.{ending}"


@pytest.mark.parametrize("ending", ["parquet", "csv", "tsv"])
def test_init_drafts_a_recipe_of_a_shop(tmp_path: Path, ending: str) -> None:
    clicks = shop(tmp_path, ending=ending)

    roles = draft_recipe(
        clicks, tmp_path / "recipe.toml", queries=tmp_path / f"customers.{ending}",
        labels=tmp_path / f"products.{ending}",
    )  # fmt: skip

    assert (roles.query_id, roles.label_id, roles.timestamp, roles.event, roles.guessed) == (
        "visitorId", "sku", "clicked_at", "event_type", [],
    )  # fmt: skip
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.data.split is not None
    assert (recipe.data.split.strategy, recipe.data.timestamp) == ("temporal", "clicked_at")
    assert recipe.data.display == ["product title", "brand", "price", "in_stock", "device"]
    query = {feature.name: (feature.kind, feature.source) for feature in recipe.query.features}
    assert query == {
        "visitorId": ("id", "visitorId"), "history": ("history", "history"), "country": ("id", "country"),
        "device": ("id", "device"), "age": ("number", "age"),
    }  # fmt: skip
    label = {feature.name: (feature.kind, feature.source, feature.separator) for feature in recipe.label.features}
    assert label == {
        "sku": ("id", "sku", None), "product_title": ("text", "product title", None),
        "price": ("number", "price", None), "brand": ("id", "brand", None),
        "tags": ("bag", "tags", "|"), "device_2": ("id", "device", None),
    }  # fmt: skip
    assert (recipe.query.features[1].entries, recipe.model.similarity) == ("both", "dot")
    assert (recipe.query.combine, recipe.label.combine) == ("concat", "sum")
    numbers = [feature for feature in (*recipe.query.features, *recipe.label.features) if feature.kind == "number"]
    assert [(feature.name, feature.transform) for feature in numbers] == [("age", "standard"), ("price", "quantile")]
    text = (tmp_path / "recipe.toml").read_text()
    for words in (
        "# Left out: image: addresses", "# Left out: in_stock: stock changes after training, so requests filter by it",
        "31 values, 1 missing",
        "# Column event_type: view 8", "# Not read: device.",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ";"), ("csv", "\t"), ("csv", "|"), ("tsv", "\t")])
def test_delimiters_are_detected(tmp_path: Path, ending: str, delimiter: str) -> None:
    """As `check` reads it, and `fit`, all rows are there."""
    clicks = shop(tmp_path, ending="csv")
    text = clicks.read_text()
    clicks.unlink()
    (tmp_path / f"shop.{ending}").write_text(text.replace(",", delimiter))
    roles = draft_recipe(tmp_path / f"shop.{ending}", tmp_path / "recipe.toml")
    assert (roles.query_id, roles.label_id, roles.timestamp, roles.event) == (
        "visitorId", "sku", "clicked_at", "event_type",
    )  # fmt: skip
    report = check(tmp_path / "recipe.toml", overrides=())
    assert report.ok, report.problems
    assert read_dataset(load_recipe(tmp_path / "recipe.toml")).report.read == text.count("\n") - 1


@pytest.mark.nightly
def test_fit_trains_the_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clicks = shop(tmp_path)
    tables = ["--labels", tmp_path / "products.parquet", "--queries", tmp_path / "customers.parquet"]

    code, out, errors = run(capsys, "init", clicks, *tables, "--out", tmp_path / "recipe.toml")
    assert (code, out) == (0, f"{tmp_path / 'recipe.toml'}\n")
    assert "query id  visitorId" in errors
    assert errors.endswith(f"\nnext: longtail-train fit {tmp_path / 'recipe.toml'} --out runs/1\n")
    code, out, errors = run(
        capsys, "fit", tmp_path / "recipe.toml", "--out", tmp_path / "bundle", "--set", "training.epochs=1"
    )

    assert (code, errors) == (0, f"next: longtail-index build {tmp_path / 'bundle'} --releases releases --publish\n")
    assert (tmp_path / "bundle" / "manifest.json").is_file()
    assert "iALS" in out


def column(values: object, kind: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, kind)])


@pytest.mark.parametrize(
    ("name", "values", "holds"),
    [
        ("zip_code", column([55123 + row for row in range(100)]), "category"),
        ("views", column(range(100)), "number"),
        ("flag", column([0, 1] * 50), "category"),
        ("price", column([1.5, float("nan"), None]), "number"),
        ("rate", column([1.5, float("inf")]), "infinite numbers"),
        ("uuid", column([f"{row:x}" for row in range(200)]), "a value of its own in most rows"),
        ("town", column(["A", "B", None] * 50), "category"),
        ("title", column([f"Postman, The ({row})" for row in range(200)]), "words"),
        ("actors", column(["Ann Bee, Cy Dee", "Cy Dee", "Ann Bee", "Ann Bee,Eve Eff"] * 50), "joined"),
        ("genres", column([["a", "b"], ["a"]]), "bag"),
        ("ids", column([[1, 2], None]), "bag"),
        ("embedding", column([[0.1, 0.2], [0.3, 0.4]]), "vector"),
        ("ragged", column([[0.1, 0.2], [0.3]]), "vectors of different lengths"),
        ("released", column([START, None]), "date"),
        ("gone", column([None, None], pa.string()), "nothing"),
        ("weights", column([[("a", 1.0)]], pa.map_(pa.string(), pa.float32())), "bag"),
        ("notes", column([[("a", "x")]], pa.map_(pa.string(), pa.string())), "a map of string to string"),
        ("holes", column([[0.1, None], [0.3, 0.4]]), "vectors with numbers that are missing or infinite"),
        ("genres", column(["['Action', 'Comedy']", "['Drama']", None, "[]"]), "bag"),
        ("genres", column(['["it\'s", "a, b"]', "[ 'x' ]", """['a\\'b', "c"]"""]), "bag"),
        ("ids", column(["[1, 2]", "[3]"]), "bag"),
        (
            "genres",
            column(["['Action', 'Comedy']", "['Drama']", "Horror"]),
            "lists in text, but not of ids in every row: 'Horror'",
        ),
        ("vectors", column(["[0.1, 0.2]", "[0.3, 0.4]"]), "lists in text, but not of ids in every row: '[0.1, 0.2]'"),
        (
            "about",
            column(['{"a": 1, "b": 2}', '{"a": 1, "b": 3}']),
            'lists in text, but not of ids in every row: \'{"a": 1, "b": 2}\'',
        ),
        ("title", column(["[REC] 2", "Saw", "Alien"]), "category"),
        ("opens", column([1, 2], pa.time32("s")), "values of type time32[s], which no feature reads"),
    ],
)
def test_column_contents_are_detected(name: str, values: pa.ChunkedArray, holds: str) -> None:
    assert profile_column(name, values).content == holds


def test_unnamed_id_columns_are_guessed_by_distinct_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    log = pa.table({"row": range(300), "a": rng.integers(50, size=300), "b": rng.integers(9, size=300)})
    pq.write_table(log, tmp_path / "log.parquet")

    roles = draft_recipe(tmp_path / "log.parquet", tmp_path / "r.toml")

    assert (roles.query_id, roles.label_id, roles.guessed) == ("a", "b", ["query_id", "label_id"])
    assert 'query_id = "a"  # a guess' in (tmp_path / "r.toml").read_text()
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.evaluation.metric == "recall@2"
    assert (recipe.query.features[-1].entries, recipe.model.similarity) == ("table", "cosine"), "labels are ids alone"
    roles = draft_recipe(tmp_path / "log.parquet", tmp_path / "s.toml", query_id="b", label_id="a")
    assert (roles.query_id, roles.label_id, roles.guessed) == ("b", "a", [])


def dirty(folder: Path, **columns: object) -> Path:
    """A log of 400 rows in which some columns are as given."""
    rng = np.random.default_rng(0)
    clean = {
        "user_id": rng.integers(20, size=400),
        "item_id": [f"i{item}" for item in rng.integers(30, size=400)],
        "time": [f"2026-01-{1 + row // 20:02} 10:{row % 60:02}:00" for row in range(400)],
    }
    pq.write_table(pa.table(clean | columns), folder / "log.parquet")
    return folder / "log.parquet"


TIMES = [f"2026-01-{1 + row // 20:02} 10:00:00" for row in range(400)]
EVENTS = ["view", "cart"] * 200
DIRTY: dict[str, tuple[dict[str, object], int]] = {
    "a null time": ({"time": [None, *TIMES[1:]]}, 1),
    "a time that is none": ({"time": ["yesterday", *TIMES[1:]]}, 1),
    "a day that no month has": ({"time": ["2026-02-30 10:00:00", *TIMES[1:]]}, 1),
    "times with zones and without": ({"time": ["2026-01-01T10:00:00Z", "2026-01-01T10:00:00+02:00", *TIMES[2:]]}, 0),
    "an infinite time": ({"time": [float("inf"), *np.linspace(1.7e9, 1.701e9, 399)]}, 1),
    "integers with a null, as pandas stores them": ({"user_id": [None, *(float(row % 20) for row in range(399))]}, 1),
    "ids that name nobody": ({"user_id": ["undefined", "NULL", *(f"u{row % 20}" for row in range(398))]}, 2),
    "events without a type": ({"event": [None, *EVENTS[1:]]}, 1),
    "categories of pandas": ({"event": pa.array(EVENTS).dictionary_encode()}, 0),
}


@pytest.mark.parametrize(("columns", "bad"), DIRTY.values(), ids=DIRTY)
def test_dirty_log_is_typed_by_most_rows(tmp_path: Path, columns: dict[str, object], bad: int) -> None:
    roles = draft_recipe(dirty(tmp_path, **columns), tmp_path / "recipe.toml")

    report = check(tmp_path / "recipe.toml")
    assert (roles.query_id, roles.label_id, roles.timestamp) == ("user_id", "item_id", "time")
    assert roles.event == ("event" if "event" in columns else None)
    assert report.problems == []
    dropped = f"{bad} by bad rows" if bad else ""
    assert dropped in report.rows[0]
    assert ("bad rows" in report.rows[0]) == bool(bad)
    assert report.queries == 20
    text = (tmp_path / "recipe.toml").read_text()
    assert f"# log.parquet: 400 rows, {report.queries} queries × {report.labels} labels." in text
    assert "".join(f"# {row}\n" for row in report.rows if row.startswith("Left out")) in text


STOCK = {
    "in_stock": [True, False] * 15, "inStock": [1, 0, 1] * 10, "available": ["yes", "no"] * 15, "stock": range(30),
    "Quantity": range(30), "qty_on_hand": range(30), "inventory_level": range(30), "always_available": [True] * 30,
}  # fmt: skip
LASTING = {
    "stocking_size": ["a", "b"] * 15, "quantity_per_pack": [1.5, 2.5, 3.5] * 10, "price": [1.5, 2.5] * 15,
    "available_since": [START + datetime.timedelta(days=day) for day in range(30)],
}  # fmt: skip


def test_stock_is_displayed_but_no_feature(tmp_path: Path) -> None:
    clicks = dirty(tmp_path)
    items = {"item_id": [f"i{item}" for item in range(30)], **STOCK, **LASTING}
    pq.write_table(pa.table({name: list(values) for name, values in items.items()}), tmp_path / "items.parquet")
    draft_recipe(clicks, tmp_path / "r.toml", labels=tmp_path / "items.parquet")
    recipe = load_recipe(tmp_path / "r.toml")
    assert [feature.source for feature in recipe.label.features[1:]] == [*LASTING]
    assert {*STOCK} <= {*recipe.data.display}
    assert (
        f"# Left out: {', '.join(STOCK)}: stock changes after training, so requests filter by it.\n"
        in (tmp_path / "r.toml").read_text()
    )


def test_line_breaks_in_names_stay_in_comments(tmp_path: Path) -> None:
    clicks = dirty(tmp_path, event=["a\nb", "c\x07d"] * 200, **{"e\nf": EVENTS, 'my "rating"\n': [1, 2, 3, 5] * 100})
    table = {"item_id": [f"i{item}" for item in range(30)], "g\nh": ["x", "y", None] * 10, "i\nj": [None] * 30}
    pq.write_table(pa.table(table), tmp_path / "items.parquet")
    draft_recipe(clicks, tmp_path / "r.toml", labels=tmp_path / "items.parquet")

    assert check(tmp_path / "r.toml").problems == []
    text = (tmp_path / "r.toml").read_text()
    (tmp_path / "r.toml").write_text(re.sub("^train = ", "# ", text, flags=re.M).replace("# train", "train"))
    assert read_dataset(load_recipe(tmp_path / "r.toml")).report.read == 100


def test_existing_recipe_is_not_overwritten(tmp_path: Path) -> None:
    clicks, out = shop(tmp_path), tmp_path / "recipe.toml"
    out.write_text("mine")

    with pytest.raises(
        RecipeError, match=r"recipe\.toml already exists: .* free; nothing was changed; choose another, or delete it"
    ):
        draft_recipe(clicks, out)
    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "CLICKS --set data.query_id=who",
            "data.query_id: expected one of visitorId, sku, clicked_at, event_type, device",
        ),
        (
            "CLICKS --set data.label_id=visitorId --set data.query_id=visitorId",
            "expected two columns of ids, received 'visitorId'",
        ),
        (
            "CLICKS --set data.since=30d",
            "longtail-train: --set: expected KEY=COLUMN of data.query_id, data.label_id, data.timestamp, data.event, "
            "received 'data.since=30d'; edit the recipe for other keys",
        ),
        ("gone.csv", "gone.csv: expected a csv file, found none"),
        ("FOLDER/log.txt", "log.txt: expected an ending among .parquet, .csv, .tsv, .jsonl, .ndjson, received '.txt'"),
        ("FOLDER/garbled.parquet", "garbled.parquet: expected a readable parquet file: "),
        ("FOLDER/latin.csv", "latin.csv: expected UTF-8 text, found other bytes"),
        ("FOLDER/nobody.parquet", "nobody.parquet: expected at least one interaction, found none"),
        ("FOLDER/empty.csv", "empty.csv: expected at least one row, found none"),
        (
            "FOLDER/numbers.csv",
            "numbers.csv: expected a column of query ids and one of label ids,",
        ),
        ("CLICKS --labels FOLDER/customers.parquet --set data.label_id=sku", "expected a column 'sku', the ids of "),
        ("FOLDER/ids.csv --labels FOLDER/texts.parquet", ""),
        ("CLICKS --out FOLDER/no/recipe.toml", "expected a directory "),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    clicks, out = shop(tmp_path), tmp_path / "recipe.toml"
    (tmp_path / "garbled.parquet").write_text("no")
    (tmp_path / "log.txt").write_text("user,item\n")
    (tmp_path / "latin.csv").write_bytes("user,item\na,café\n".encode("latin-1"))
    pq.write_table(pa.table({"user": pa.nulls(2, pa.string()), "item": ["1", "2"]}), tmp_path / "nobody.parquet")
    (tmp_path / "empty.csv").write_text("user,item\n")
    (tmp_path / "numbers.csv").write_text("a,b\n1.5,2.5\n")
    (tmp_path / "ids.csv").write_text("user,item\n1,2\n3,4\n")
    pq.write_table(pa.table({"item": ["3", "4"]}), tmp_path / "texts.parquet")
    words = command.replace("CLICKS", str(clicks)).replace("FOLDER", str(tmp_path)).split()

    code, _, errors = run(capsys, "init", *words, *([] if "--out" in words else ["--out", out]))

    assert (code, out.exists()) == ((2, False) if message else (0, True))
    assert not message or errors.count("\n") == 1
    assert message in errors


# Rejections


REJECTED = """
    not_for_me did_not_finish do_not_recommend not_now NotBought never_show_again undo undo_like swipe_no
    remove_from_cart RemoveFromCart removefromcart REMOVE_FROM_CART order-cancelled canceled CANCELLED cancellation
    dislike disliked Un-Like unlike unfollow unsubscribed unfavourite unstarred unpin unmatch refund refunded return
    order_returned purchase_return not_interested notInterested notinterested don't_like no_thanks show_less skip
    view_skipped hide hidden report block_user delete thumbs_down thumbsDown thumbsdown downvote vote_down mute
    dismiss reject decline complaint chargeback abandon cart_abandonment swipe_left opt_out clear_cart
    negative_feedback pass
"""
DRAFT = """
    checkout_no_account guest_not_signed_in_purchase not_logged_in_view notable formyself un_conference_view
    view click purchase like love discover display unlock unbox return_visit returning_user ReturnVisit
    discount_view undergo report_view download_report skipless wireless banner_click hat notify notification_open
    note download scroll_down dropdown_select blockbuster_view unique_view under unblock unmute undo_remove
    add_to_cart dispatch distance cancer_info refundable_view reporter season_pass_purchase skip_intro unread cover
"""


@pytest.mark.parametrize(("names", "expected"), [(REJECTED, True), (DRAFT, False)])
def test_rejections_are_recognised(names: str, expected: bool) -> None:
    assert [name for name in names.split() if rejects(name) != expected] == []


def test_rejected_events_weigh_0(tmp_path: Path) -> None:
    kinds = ["view", "addtocart", "remove_from_cart", "purchased", "refund"] * 80
    draft_recipe(dirty(tmp_path, event=kinds), tmp_path / "r.toml")

    events = load_recipe(tmp_path / "r.toml").data.events
    assert events is not None
    assert events.weights == {"view": 1, "addtocart": 2, "remove_from_cart": 0, "purchased": 3, "refund": 0}
    assert "0 leaves the rows of remove_from_cart, refund out" in (tmp_path / "r.toml").read_text()
    assert "160 by event types of weight 0" in check(tmp_path / "r.toml").rows[0]


def test_a_log_of_rejections_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'event': expected an event type .* only words of rejection: dislike, skip"):
        draft_recipe(dirty(tmp_path, event=["dislike", "skip"] * 200), tmp_path / "r.toml")
    assert not (tmp_path / "r.toml").exists()


@pytest.mark.parametrize(
    ("ratings", "span", "least"),
    [([1, 2, 3, 4, 5], "1 to 5", 4), ([0.5, 3.5, 4.0, 5.0, None], "0.5 to 5", 4), ([1, 6, 7, 8, 10], "1 to 10", 8)],
)
def test_low_ratings_are_named(tmp_path: Path, ratings: list[float], span: str, least: int) -> None:
    draft_recipe(dirty(tmp_path, rating=ratings * 80), tmp_path / "r.toml")

    text = (tmp_path / "r.toml").read_text()
    assert f"# Column rating, {span}: low ones count as positives" in text
    assert f'rating\\" >= {least}"' in text
    (tmp_path / "r.toml").write_text(re.sub("^train = ", "# ", text, flags=re.M).replace("# train", "train"))
    assert read_dataset(load_recipe(tmp_path / "r.toml")).report.read == 80 * sum(
        (rating or 0) >= least for rating in ratings
    )


# The label table


def described(folder: Path, **columns: object) -> Path:
    """A table of the labels of `dirty` and 60 more, in which some columns are as given."""
    pq.write_table(pa.table({"item_id": [f"i{item}" for item in range(90)]} | columns), folder / "items.parquet")
    return folder / "items.parquet"


def test_filter_columns_are_displayed(tmp_path: Path) -> None:
    days = [START.date() + datetime.timedelta(days=row) for row in range(90)]
    table = {
        "price": pa.array([decimal.Decimal(f"{row}.99") for row in range(90)]),
        "stock": range(90),
        "on_offer": [row % 2 == 0 for row in range(90)],
        "for_sale": [True] * 90,
        "colour": [["red", "blue"][row % 2] for row in range(90)],
        "tags": [["wood"], ["wood", "home"], None] * 30,
        "day": days,
        "title": [f"The thing of {row} parts" for row in range(90)],
        "uuid": [f"{row:x}-{row}" for row in range(90)],
        "picture": [f"http://shop/{row}.png" for row in range(90)],
        "vector": [[0.1, float(row)] for row in range(90)],
        "currency": ["EUR"] * 90,
        "count": range(90),
        "opens": pa.array(range(90), pa.time32("s")),
    }
    draft_recipe(dirty(tmp_path), tmp_path / "r.toml", labels=described(tmp_path, **table))

    displayed = load_recipe(tmp_path / "r.toml").data.display
    assert displayed == ["title", "price", "stock", "on_offer", "for_sale", "colour", "tags", "day"]
    display = pq.read_table(tmp_path / "items.parquet").select(displayed)
    assert check_filterable(display, displayed) == tuple(displayed)
    assert DisplayColumns(display).to_json(1)["price"] == "1.99"
    assert LabelAttributes(display).select({"price": {"lt": 20}, "for_sale": True, "tags": "home"}, "filter")
    assert check(tmp_path / "r.toml").problems == []
    many = {f"number_{at}": np.arange(90) + at for at in range(20)}
    draft_recipe(dirty(tmp_path), tmp_path / "s.toml", labels=described(tmp_path, **many, name=table["title"]))
    assert load_recipe(tmp_path / "s.toml").data.display == ["name", *(f"number_{at}" for at in range(9))]


@pytest.mark.parametrize("form", ["{0}, {1}", "{0} | {1}", "['{0}', '{1}']", '["{0}","{1}"]', "['{0}' '{1}']"])
def test_joined_text_is_split(tmp_path: Path, form: str) -> None:
    genres = ["Action", "Comedy", "Drama", "Horror"]
    joined = [form.format(genres[row % 4], genres[row // 4 % 4]) for row in range(90)]
    draft_recipe(dirty(tmp_path), tmp_path / "r.toml", labels=described(tmp_path, genres=joined))

    (rows,) = [
        feature["rows"] for feature in check(tmp_path / "r.toml").features if feature["feature"] == "label genres"
    ]
    assert rows == 1 + len(genres), "one of what is unknown"


SINCE = ["created_at", "dateAdded", "available_from", "published", "release_date", "launch", "first_seen", "listed_at"]


@pytest.mark.parametrize("kind", ["date", "seconds", "text"])
def test_availability_dates_are_named(tmp_path: Path, kind: str) -> None:
    days = [START + datetime.timedelta(days=row) for row in range(90)]
    values = {
        "date": days,
        "seconds": [int(day.timestamp()) for day in days],
        "text": [f"{day:%Y-%m-%d}" for day in days],
    }
    others = ["updated_at", "available_until", "last_seen", "expires", "removed_on"]
    table = dict.fromkeys([*SINCE, *others], values[kind])
    draft_recipe(dirty(tmp_path), tmp_path / "r.toml", labels=described(tmp_path, **table, added_weight=range(90)))

    text = (tmp_path / "r.toml").read_text()
    assert re.findall(r"# By its name, (\w+) in .*items.parquet is since when a label is there", text) == SINCE


@pytest.mark.parametrize(
    ("log", "table"),
    [
        ([f" p{item}" for item in range(30)], [f"p{item}" for item in range(30)]),
        ([f"{item:03}" for item in range(30)], [*range(30)]),
        ([*range(30)], [f"{item:03}" for item in range(30)]),
        ([*range(30)], [*(float(item) for item in range(100, 130)), None]),
    ],
)
def test_ids_without_a_row_are_named(tmp_path: Path, log: list[object], table: list[object]) -> None:
    drawn = np.random.default_rng(0).integers(20, size=400)
    clicks = dirty(tmp_path, item_id=[log[item] for item in drawn])
    pq.write_table(pa.table({"item_id": table}), tmp_path / "items.parquet")
    draft_recipe(clicks, tmp_path / "r.toml", labels=tmp_path / "items.parquet")

    (line,) = re.findall("# .* have no row .*", (tmp_path / "r.toml").read_text())
    texts = [f"{id_:.0f}" if isinstance(id_, float) else str(id_) for id_ in table]
    ids = list(dict.fromkeys(str(log[item]) for item in drawn))
    unlisted = [id_ for id_ in ids if id_ not in texts]
    example = describe_example(pa.array(unlisted), pa.array(texts), nothing=False)
    assert f"# {len(unlisted)} of the 20 labels have no row in " in line
    assert line.endswith(f"{example}.") if example else " such as " in line
    assert check(tmp_path / "r.toml").labels == int(re.findall(r"× (\d+) labels", (tmp_path / "r.toml").read_text())[0])


@pytest.mark.parametrize(
    ("ids", "listed", "pair"),
    [
        (["39.0"], ["a", "39"], ("39.0", "39")),
        (["b", "\u00a0p1\ufeff"], ["p2", "p 1"], ("\u00a0p1\ufeff", "p 1")),
        (["000"], ["0"], ("000", "0")),
        (["0.0"], ["00"], ("0.0", "00")),
        (["10", "1.50", "p1", "a."], ["1", "1.5", "P1", "a"], None),
        ([], ["a"], None),
        (["a"], [], None),
    ],
)
def test_lookalikes(ids: list[str], listed: list[str], pair: tuple[str, str] | None) -> None:
    example = describe_example(pa.array(ids, pa.string()), pa.array(listed, pa.large_string()), nothing=False)
    assert example == ("" if pair is None else f", such as {pair[0]!r}, where it has {pair[1]!r}")


# What passes


def draw_times(rows: int = 8_000, days: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """A rising time for each row, and noise in which label of ten is wanted."""
    rng = np.random.default_rng(3)
    return np.sort(rng.uniform(0, days, rows)), rng.integers(0, 10, rows)


def drafted(tmp_path: Path, labels_N: np.ndarray, days_N: np.ndarray, *, described: bool = False) -> tuple[Recipe, str]:
    """A recipe drafted from a log of these labels, by the users in turn, and their colours."""
    rows = {
        "user_id": np.arange(len(labels_N)) * 7 % 400,
        "item_id": [f"p{label}" for label in labels_N],
        "at": [START + datetime.timedelta(days=float(day)) for day in days_N],
    }
    pq.write_table(pa.table(rows), tmp_path / "log.parquet")
    items = {"item_id": [f"p{label}" for label in range(100)], "colour": ["red", "blue"] * 50}
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    draft_recipe(
        tmp_path / "log.parquet", tmp_path / "r.toml", labels=tmp_path / "items.parquet" if described else None
    )
    return load_recipe(tmp_path / "r.toml"), (tmp_path / "r.toml").read_text()


def test_drifting_log_gets_a_prior(tmp_path: Path) -> None:
    days_N, noise_N = draw_times()
    recipe, text = drafted(tmp_path, 10 * (days_N // 10).astype(int) + noise_N, days_N)

    assert recipe.prior.kind in ("decayed", "forecast")
    assert re.search(r"than by all earlier pairs alike, \+[12]\.\d\d by pairs that weigh half after [\d.]+ days", text)
    assert check(recipe) is not None


def test_stationary_log_keeps_the_training_prior(tmp_path: Path) -> None:
    days_N, noise_N = draw_times()
    recipe, text = drafted(tmp_path, noise_N, days_N)

    assert recipe.prior.kind == "count"
    assert "So popularity lasts, and that of training is served." in text


@pytest.mark.parametrize("passes", [True, False])
def test_drifting_log_gets_periods(tmp_path: Path, passes: bool) -> None:
    days_N, noise_N = draw_times()
    labels_N = 10 * (days_N // 10).astype(int) + noise_N if passes else noise_N
    recipe, _ = drafted(tmp_path, labels_N, days_N, described=True)
    assert recipe.training.periods == (8 if passes else 1)
    assert recipe.optimizer.l2 == 0.001, "30 over fewer than 30,000 pairs would be more"
    assert check(recipe) is not None
    (tmp_path / "ids").mkdir()
    recipe, _ = drafted(tmp_path / "ids", labels_N, days_N)
    assert recipe.training.periods == 1
    assert recipe.optimizer.l2 == 0, "towers of ids alone compare directions, which have no length"


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([0.0, 1.0, None, 7.0], "category"),
        ([0.0, 1.5, None, 7.0], "number"),
        ([float("nan"), 1.0, 2.0], "category"),
    ],
)
def test_float_codes_are_categories(values: list[float | None], holds: str) -> None:
    assert profile_column("brand_id", pa.chunked_array([pa.array(values, pa.float64())])).content == holds
    assert profile_column("price", pa.chunked_array([pa.array([*values, 9.0, 8.0])])).content == "number"


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (["0,99", "12", "1.234,50"], "numbers with decimal commas"),
        (["1,234,567.5", "12.00"], "numbers with decimal commas"),
        (["$ 9.50", "10"], "numbers with decimal commas"),
        (["9,50 EUR", "10 EUR"], "numbers with decimal commas"),
        (["5%", "10 %"], "numbers with decimal commas"),
        (["31.01.2026", "1.2.2026"], "days of another order"),
        (["01/31/2026 10:00", "02/01/2026 11:00"], "days of another order"),
    ],
)
def test_local_number_formats_are_left_out_with_a_hint(values: list[str], what: str) -> None:
    content = profile_column("price", pa.chunked_array([[*values, None]])).content
    assert content.startswith(what)
    assert content.endswith(f": found {values[0]!r}")


@pytest.mark.parametrize(
    "values", [["00123", "00456"], ["ABC123", "ABC124"], ["1|2", "2|3"], ["1,2,3", "2"], ["v1.2", "3"]]
)
def test_codes_are_no_local_number_formats(values: list[str]) -> None:
    assert "which no feature reads" not in profile_column("sort", pa.chunked_array([values * 20])).content
