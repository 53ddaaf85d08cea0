"""Where data may lie: files, directories, globs, partitions, other file systems; which rows and columns count."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.tables.database import OpenedFile
from longtail.trainer.cli import app
from longtail.trainer.config import Recipe, load_recipe, recipe_toml
from longtail.trainer.config.rows import name_sources
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.prepared import prepare
from longtail.trainer.errors import DataError, RecipeError
from tests.trainer import tiny
from tests.trainer.logs import load, name_pairs, write_table


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Three files in folders by day and event, a marker as Spark leaves it, and one CSV."""
    folder = tmp_path / "logs"
    write_table(folder / "day=2" / "event=buy" / "part-0.parquet", user=["c"], item=[1])
    write_table(folder / "day=1" / "event=view" / "part-1.parquet", user=["b"], item=[1])
    write_table(folder / "day=1" / "event=view" / "part-0.parquet", user=["a"], item=[2])
    (folder / "day=10" / "event=buy").mkdir(parents=True)
    (folder / "day=10" / "event=buy" / "late.csv").write_text("user,item\nd,2\n")
    (folder / "_SUCCESS").write_text("")
    (folder / "day=1" / ".part-0.parquet.crc").write_text("no data")
    return folder


def test_directory_is_read_by_file_name(logs: Path) -> None:
    dataset = load(logs)

    assert name_pairs(dataset) == ["a-2", "b-1", "d-2", "c-1"]
    assert dataset.fingerprint == load(f"{logs}/").fingerprint


def test_list_keeps_order_and_glob_sorts(logs: Path) -> None:
    assert name_pairs(load([f"{logs}/day=2/*/*.parquet", f"{logs}/day=1"])) == ["c-1", "a-2", "b-1"]
    assert name_pairs(load(f"{logs}/**/*.parquet")) == ["a-2", "b-1", "c-1"]


def test_folders_give_columns(logs: Path) -> None:
    assert name_pairs(load(f"SELECT * FROM '{logs}' WHERE day >= '2'")) == ["d-2", "c-1"]
    assert name_pairs(load(f"SELECT * FROM '{logs}' WHERE event = 'view' AND user <> 'a'")) == ["b-1"]
    weighted = load(logs, events={"column": "event", "weights": {"view": 1, "buy": 10}})
    assert weighted.train.weights.tolist() == [1, 1, 10, 10]


def test_file_column_hides_folder_column(tmp_path: Path) -> None:
    path = write_table(tmp_path / "day=7" / "a.parquet", user=["a", "b"], item=[1, 2], day=[1, 7])

    assert name_pairs(load(f"SELECT * FROM '{path}' WHERE day = 7")) == ["b-2"]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_a_url_is_read_through_fsspec(logs: Path, memory: fsspec.AbstractFileSystem) -> None:
    for path in logs.rglob("*"):
        if path.is_file():
            memory.pipe(f"/shop/{path.relative_to(logs)}", path.read_bytes())

    assert load("memory://shop/").fingerprint == load(logs).fingerprint
    assert name_pairs(load("memory://shop/day=1/*/*.parquet")) == ["a-2", "b-1"]
    assert name_pairs(load(["memory://shop/day=2", f"{logs}/day=1"])) == ["c-1", "a-2", "b-1"]
    with pytest.raises(DataError, match=r"memory://shop/gone\.csv: expected a csv file, found none"):
        load("memory://shop/gone.csv")


def test_missing_file_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"nosuch://a/b: expected files of a file system that answers: .*nosuch"):
        load("nosuch://a/b")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(DataError, match=r"s3://shop/logs: expected the extra `remote`, pip install '.*\[remote\]'"):
        load("s3://shop/logs")


def test_feature_tables_may_be_many_files(tmp_path: Path, logs: Path) -> None:
    write_table(tmp_path / "items" / "1.parquet", item=[2], price=pa.array([5], pa.int32()))
    write_table(tmp_path / "items" / "2.parquet", item=[1, 9], price=[0.5, 9.5], new=["x", "y"])

    dataset = load(logs, labels=tmp_path / "items")

    prices = dict(zip(dataset.label_ids.to_pylist(), dataset.label_table["price"].to_pylist(), strict=True))
    assert prices == {"1": 0.5, "2": 5, "9": 9.5}
    assert dataset.label_table["new"].null_count == 1


def test_only_needed_columns_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny.write_job(tmp_path)
    read: dict[str, list[str]] = {}
    column = OpenedFile.column

    def watched(opened: OpenedFile, name: str) -> tuple[str, str]:
        names = read.setdefault(Path(opened.file.path).name, [])
        names += [name] if name not in names else []
        return column(opened, name)

    monkeypatch.setattr(OpenedFile, "column", watched)
    for name in ("interactions", "items"):
        table = pq.read_table(tmp_path / f"{name}.parquet")
        pq.write_table(table.append_column("wide", pa.array([0] * table.num_rows)), tmp_path / f"{name}.parquet")
    recipe = load_recipe(job)

    load_dataset(recipe.data, seed=0, columns=recipe.table_columns)

    assert read == {
        "interactions.parquet": ["user_id", "item_id", "timestamp"],
        "items.parquet": ["item_id", "title", "genres"],
    }


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A recipe in a folder of its own: orders as CSV, with a line that is no row, and their items as Parquet."""
    folder = tmp_path / "shop"
    write_table(folder / "lines" / "1.parquet", order=[1, 1, 2, 3], item=["x", "y", "x", "z"])
    (folder / "orders.csv").write_text("order,user,state\n1,a,paid\n2,b,paid\n3,a,cancelled\nbroken\n")
    (folder / "recipe.toml").write_text(
        '''
name = "shop"
[data]
train = """
SELECT user, item, order AS place FROM 'orders.csv' JOIN 'lines/*.parquet' USING ("order") WHERE state = 'paid'
"""
query_id = "user"
label_id = "item"
labels = "SELECT item, count(*) AS sold FROM 'lines' GROUP BY item"
max_bad_rows = 0.5
[query]
features = [{ name = "user", kind = "id" }]
[label]
features = [{ name = "item", kind = "id" }, { name = "sold", kind = "number" }]
[model]
dim = 4
'''.replace("order AS place", '"order" AS place')
    )
    return folder / "recipe.toml"


def test_query_paths_are_relative_to_the_recipe(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop.parent.parent)

    for path in (shop, shop.relative_to(shop.parent.parent)):
        recipe = load_recipe(path)
        dataset = load_dataset(recipe.data, seed=0, columns=recipe.table_columns)
        assert name_pairs(dataset) == ["a-x", "a-y", "b-x"]
        assert dataset.label_table["sold"].to_pylist() == [2, 1, 1]
        assert dataset.report.dropped == 1
        assert str(dataset.report.problems[0]).startswith(f"{path.parent}/orders.csv: expected 3 columns")


def test_a_query_is_written_as_it_is_read(shop: Path, tmp_path: Path) -> None:
    recipe = load_recipe(shop)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "recipe.toml").write_text(recipe_toml(recipe, tmp_path / "again"))
    assert '\\"../shop/orders.csv\\"' in (tmp_path / "again" / "recipe.toml").read_text()
    again = load_recipe(tmp_path / "again" / "recipe.toml")
    plain = Recipe.model_validate_json(recipe.model_dump_json(by_alias=True))
    for other in (again, plain):
        assert load_dataset(other.data, seed=0).fingerprint == load_dataset(recipe.data, seed=0).fingerprint


def test_bad_lines_of_a_query_are_refused(shop: Path) -> None:
    recipe = load_recipe(shop, ["data.max_bad_rows=0"])
    with pytest.raises(DataError, match=r"orders\.csv: expected 3 columns, found .* in line 5"):
        load_dataset(recipe.data, seed=0)


def test_prepared_query_is_read_again_if_files_change(shop: Path) -> None:
    recipe = load_recipe(shop, ["data.prepared=kept"])
    first = prepare(recipe)[1]
    assert prepare(recipe)[1] == first
    with (shop.parent / "orders.csv").open("a") as log:
        log.write("3,b,paid\n")
    dataset, second = prepare(recipe)
    assert second != first
    assert not first.exists()
    assert name_pairs(dataset)[-1] == "b-z"


def test_check_and_a_lake_table(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deltalake = pytest.importorskip("deltalake")
    rows = pa.table({"user": [f"u{at % 9}" for at in range(90)], "item": [f"i{at % 7}" for at in range(90)]})
    deltalake.write_deltalake(shop.parent / "clicks", rows)
    log = "data.train=SELECT user, item FROM 'clicks' WHERE item <> 'i0'"
    for train in (log, "data.train=clicks", f'data.train=["clicks", "{log.partition("=")[2]}"]'):
        arguments = ["check", str(shop), "--set", train, "--set", "data.labels=SELECT DISTINCT item FROM 'clicks'"]
        with pytest.raises(SystemExit) as ended:
            app([*arguments, "--set", 'label.features=[{ name = "item", kind = "id" }]'])
        assert ended.value.code == 0, capsys.readouterr().err


def test_unreadable_query_names_the_recipe(shop: Path) -> None:
    with pytest.raises(RecipeError, match=r"recipe\.toml: SELECT 1; SELECT 2: expected one SELECT, found 2 statements"):
        load_recipe(shop, ["data.train=SELECT 1; SELECT 2"])


def test_messages_shorten_queries() -> None:
    query = "SELECT item,\n  a_column_with_a_long_name, another_column_with_a_long_name FROM 'a.csv'"
    assert name_sources(["a.csv", query]) == "a.csv and 1 more"
    assert name_sources(query) == "SELECT item, a_column_with_a_long_name, another_column_with_…"


def test_paths_are_relative_to_the_recipe_but_urls_are_not(tmp_path: Path) -> None:
    overrides = ['data.train=["a", "s3://b", "/c"]', "data.labels=s3://shop/logs", "data.prepared=kept"]
    data = load_recipe(tiny.write_job(tmp_path), overrides).data
    assert (data.train, data.labels) == ([tmp_path / "a", "s3://b", Path("/c")], "s3://shop/logs")
    assert data.prepared == tmp_path / "kept"
