"""MovieLens 100K and 1M (Harper and Konstan 2015), from GroupLens."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from longtail.trainer.data.sources.downloads import Download, Source, Wheel, listing
from longtail.trainer.data.sources.lists import read_lists
from longtail.trainer.errors import DataError

SOURCES_100K = (
    Source(
        "the official GroupLens archive",
        (
            Download(
                "https://files.grouplens.org/datasets/movielens/ml-100k.zip",
                "ml-100k.zip",
                "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
            ),
        ),
        "https://grouplens.org/datasets/movielens/100k/",
    ),
    Source(
        "the recbole 1.2.1 wheel on PyPI",
        Wheel("recbole==1.2.1", "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"),
        "recbole/dataset_example/ml-100k in the wheel that `pip download --no-deps recbole==1.2.1` gets",
    ),
)
SOURCES_1M = (
    Source(
        "the official GroupLens archive",
        (
            Download(
                "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
                "ml-1m.zip",
                "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
            ),
        ),
        "https://grouplens.org/datasets/movielens/1m/",
    ),
)

_GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
_TRAILING_ARTICLE = re.compile(r"^(.*), (The|A|An)( \(.*)?$")


def read_100k(folder: Path) -> dict[str, pa.Table]:
    """Return `interactions` (`user_id`, `item_id`, `rating`, `timestamp`), `users` and `items`.

    The files are `u.data`, `u.user`, `u.item` of GroupLens, or `ml-100k.inter`, `.user`, `.item` of RecBole.
    """
    if (folder / "u.data").is_file():
        interactions = _delimited(folder / "u.data", "\t", ["user_id", "item_id", "rating", "timestamp"])
        users = _delimited(folder / "u.user", "|", ["user_id", "age", "gender", "occupation", "zip_code"])
        raw = _delimited(folder / "u.item", "|", ["item_id", "title", "date", "video", "url", *_GENRES_100K], "latin-1")
        flags = [raw[genre].to_pylist() for genre in _GENRES_100K]
        genres = [
            "|".join(g for g, flag in zip(_GENRES_100K, row, strict=True) if flag) for row in zip(*flags, strict=True)
        ]
        items = pa.table({"item_id": raw["item_id"], "title": raw["title"], "genres": genres})
    elif (folder / "ml-100k.inter").is_file():
        interactions = _delimited(folder / "ml-100k.inter", "\t", ["user_id", "item_id", "rating", "timestamp"], skip=1)
        users = _delimited(
            folder / "ml-100k.user", "\t", ["user_id", "age", "gender", "occupation", "zip_code"], skip=1
        )
        raw = _delimited(folder / "ml-100k.item", "\t", ["item_id", "name", "year", "class"], skip=1)
        year = pc.binary_join_element_wise(" (", raw["year"].cast(pa.string()), ")", "")
        title = pc.binary_join_element_wise(raw["name"], pc.fill_null(year, ""), "")
        genres = pc.replace_substring(pc.fill_null(raw["class"], ""), " ", "|")
        items = pa.table({"item_id": raw["item_id"], "title": title, "genres": genres})
    else:
        raise DataError(f"{folder}: expected u.data (GroupLens) or ml-100k.inter (RecBole), found {listing(folder)}")
    timestamps = interactions["timestamp"].cast(pa.int64())
    return {
        "interactions": interactions.set_column(3, "timestamp", timestamps),
        "users": users.drop_columns(["zip_code"]),
        "items": _readable(items),
    }


def read_1m(folder: Path) -> dict[str, pa.Table]:
    """Return `train` and `test` (`user_id`, `item_id`), `users` and `items`.

    The files are a published split (`train.txt`, `test.txt`: per-user lists of original ids − 1), or `ratings.dat` of
    GroupLens, in which each user's latest fifth is test.
    """
    if (folder / "train.txt").is_file():
        splits = {}
        for split in ("train", "test"):  # the ids of MovieLens are one higher than those of the lists
            pairs = read_lists(folder / f"{split}.txt")
            columns = [pc.add(pairs[name].cast(pa.string()).cast(pa.int64()), 1) for name in ("query", "label")]
            splits[split] = pa.table(columns, names=["user_id", "item_id"])
    elif (folder / "ratings.dat").is_file():
        ratings = _double_colons(folder / "ratings.dat", ["user_id", "item_id", "rating", "timestamp"])
        ratings = ratings.select(["user_id", "item_id", "timestamp"]).cast(
            pa.schema([(name, pa.int64()) for name in ("user_id", "item_id", "timestamp")])
        )
        ratings = ratings.sort_by([("user_id", "ascending"), ("timestamp", "ascending")])
        splits = _latest_fifth(ratings)
    else:
        raise DataError(f"{folder}: expected train.txt and test.txt, or ratings.dat, found {listing(folder)}")
    users = _double_colons(folder / "users.dat", ["user_id", "gender", "age", "occupation", "zip_code"])
    items = _double_colons(folder / "movies.dat", ["item_id", "title", "genres"])
    return splits | {
        "users": _integer_ids(users, "user_id").drop_columns(["zip_code"]),
        "items": _readable(_integer_ids(items, "item_id")),
    }


def _latest_fifth(ratings: pa.Table) -> dict[str, pa.Table]:
    """Split each user's ratings by time, four fifths to one."""
    import numpy as np

    users = ratings["user_id"].to_numpy()
    _, start, count = np.unique(users, return_index=True, return_counts=True)
    rank = np.arange(len(users)) - np.repeat(start, count)
    late = rank >= np.repeat(np.ceil(count * 0.8), count)
    pairs = ratings.select(["user_id", "item_id"])
    return {"train": pairs.filter(pa.array(~late)), "test": pairs.filter(pa.array(late))}


def _integer_ids(table: pa.Table, column: str) -> pa.Table:
    return table.set_column(table.column_names.index(column), column, table[column].cast(pa.int64()))


def _readable(items: pa.Table) -> pa.Table:
    """Move articles to the front of titles: `Matrix, The (1999)` → `The Matrix (1999)`."""
    titles = [_TRAILING_ARTICLE.sub(r"\2 \1\3", title) for title in items["title"].to_pylist()]
    return items.set_column(items.column_names.index("title"), "title", pa.array(titles))


def _delimited(path: Path, delimiter: str, names: list[str], encoding: str = "utf8", *, skip: int = 0) -> pa.Table:
    try:
        return pyarrow.csv.read_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(column_names=names, encoding=encoding, skip_rows=skip),
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char=False),
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: expected {len(names)} columns separated by {delimiter!r}: {error}") from error


def _double_colons(path: Path, names: list[str]) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path}: expected a file of lines `{'::'.join(names)}`, found none")
    rows = [line.split("::") for line in path.read_text(encoding="latin-1").splitlines()]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise DataError(f"{path}: expected `{'::'.join(names)}` in line {number}, found {'::'.join(row)[:80]!r}")
    return pa.table(dict(zip(names, zip(*rows, strict=True), strict=True)))
