"""Find the files of a source: links, loops, Hive folders, object stores."""

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.tables import DataError, find_files
from longtail.tables.database import open_database
from longtail.tables.table import all_columns, read_table
from tests.s3 import BUCKET, S3Server
from tests.tables.reading import read_rows


def names(source: Path | str, folder: Path) -> list[str]:
    return [file.name.removeprefix(f"{folder}/") for file in find_files(source)]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name in ("logs/day=007", "logs/day=__HIVE_DEFAULT_PARTITION__", "logs/day=a%2Fb", "elsewhere/day=1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.csv").write_text("item\n1\n")
    return tmp_path / "logs"


def test_folders_give_text(logs: Path) -> None:
    assert [row["day"] for row in read_rows(logs)] == ["007", None, "a/b"]


@pytest.mark.parametrize("source", ["", "/**", "/**/*.csv", "/*/**/a.csv"])
def test_links_are_followed_once(logs: Path, source: str) -> None:
    (logs / "another").symlink_to(logs.parent / "elsewhere")
    (logs / "again").symlink_to(logs / "day=007")
    (logs / "day=007" / "loop").symlink_to(logs)
    (logs / "day=007" / "0.csv").symlink_to(logs / "day=007" / "a.csv")
    result = names(Path(f"{logs}{source}"), logs)
    assert [*sorted(result)] == [
        "another/day=1/a.csv", "day=007/a.csv", "day=__HIVE_DEFAULT_PARTITION__/a.csv", "day=a%2Fb/a.csv",
    ]  # fmt: skip


HIDDEN = ("day=1/_a.csv", "day=1/.a.csv", "_temporary/0/a.csv", ".trash/day=2/a.csv", "day=1/_x/a.csv")


@pytest.mark.parametrize("url", ["", "file://"])
@pytest.mark.parametrize("pattern", ["", "/*", "/**/*.csv", "/*/*.csv", "/[!x]*/*.csv", "/**"])
def test_globs_skip_the_same_names_as_folders(tmp_path: Path, pattern: str, url: str) -> None:
    for name in ("day=1/a.csv", *HIDDEN):
        (tmp_path / "_logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "_logs" / name).write_text("item\n1\n")
    source = f"{url}{tmp_path}/_logs{pattern}"

    result = [file.name for file in find_files(source if url else Path(source))]

    assert [name.removeprefix(f"{url}{tmp_path}/_logs/") for name in result] == ["day=1/a.csv"]


@pytest.mark.parametrize("pattern", ["day=*/_*.csv", "**/_a.csv"])
def test_a_glob_may_spell_hidden_names(tmp_path: Path, pattern: str) -> None:
    for name in ("day=1/a.csv", *HIDDEN):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("item\n1\n")
    assert names(tmp_path / pattern, tmp_path) == ["day=1/_a.csv"]


def test_broken_link_is_skipped(logs: Path) -> None:
    (logs / "gone.csv").symlink_to(logs / "nothing.csv")
    assert len(find_files(logs)) == 3


def test_long_queries_that_begin_alike_are_distinct() -> None:
    query = "SELECT a_rather_long_name_of_a_column, another_name_of_a_column FROM 'a.csv' WHERE day = "
    single, other = find_files([query + "1", query + "2"])
    assert single.name == other.name
    with pytest.raises(DataError, match="expected every file once"):
        find_files([query + "1", query + "1"])


def test_several_threads_read_one_file_at_a_url(tmp_path: Path) -> None:
    rows = 40_000
    numbers = pa.array(range(rows))
    pq.write_table(
        pa.table({"n": numbers, "text": numbers.cast(pa.string())}), tmp_path / "a.parquet", row_group_size=500
    )
    for _ in range(20):
        with open_database() as built:
            built.run("SET threads = 8")
            table = read_table(built, find_files(f"file://{tmp_path}/a.parquet"), all_columns, "places")
            result = table.arrow(["n", "text"])
        assert result["n"].combine_chunks().equals(numbers)
        assert result["text"].cast(pa.int64()).combine_chunks().equals(numbers)


def test_objects_of_s3(s3: S3Server) -> None:
    import obstore.store

    store = obstore.store.from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    for day in ("007", "008"):
        store.put(f"{s3.url().rpartition('/')[2]}/x.txt", b"")
        store.put(f"files/day={day}/a.csv", b"item\n1\n")
        store.put(f"files/day={day}/b.jsonl", b'{"item": 2}\n')
    assert [(row["item"], row["day"]) for row in read_rows(f"s3://{BUCKET}/files")] == [
        ("1", "007"), ("2", "007"), ("1", "008"), ("2", "008"),
    ]  # fmt: skip
    assert read_rows(f"SELECT item, day FROM 's3://{BUCKET}/files/*/a.csv' WHERE day > '007'") == [
        {"item": 1, "day": "008"}
    ]
    with pytest.raises(DataError, match="expected a csv file, found none"):
        read_rows(f"s3://{BUCKET}/files/gone.csv")
    with pytest.raises(DataError, match=r"expected files of a file system that answers: .*404"):
        read_rows("s3://nobody/gone.csv")


@pytest.mark.parametrize("url", ["gs://shop/a.csv", "az://shop/a.csv", "abfs://shop/a.csv"])
def test_unreachable_store_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(DataError, match=rf"{url}: expected files of a file system that answers"):
        find_files(url)
    assert time.monotonic() - began < 100
