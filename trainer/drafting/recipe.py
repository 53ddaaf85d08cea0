"""Writes a recipe with its reasons, from a log and the feature tables beside it."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle.arrays import Bools, Float64
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.bundle.sets import distinct
from longtail.trainer.config import load_recipe
from longtail.trainer.data.ids import like_placeholders
from longtail.trainer.data.times import UNITS, as_times, implausible, in_words, unit_of
from longtail.trainer.drafting.columns import read_table, words_of
from longtail.trainer.drafting.recency import HalfLife, half_life_of
from longtail.trainer.drafting.roles import TIME_WORDS, Roles, roles_of
from longtail.trainer.drafting.towers import WIDTH, Sizes, columns_of, label_tower, query_tower, quoted, tower_text
from longtail.trainer.errors import DataError, RecipeError

# Gentle: one purchase in twenty that weighs 10 leaves two fifths of the pairs' (Σw)²/Σw².
_EVENT_WEIGHTS = {"view": 1, "click": 1, "impression": 1, "like": 2, "wishlist": 2, "cart": 2, "basket": 2,
                  "checkout": 3, "purchase": 3, "order": 3, "buy": 3, "transaction": 3}  # fmt: skip
_SECONDS_A_DAY = 86_400
_TITLES = {"title", "name", "brand", "headline", "label"}


def draft_recipe(
    clicks: Path, out: Path, *, queries: Path | None = None, labels: Path | None = None,
    query_id: str | None = None, label_id: str | None = None, timestamp: str | None = None, event: str | None = None,
) -> Roles:  # fmt: skip
    """Look at the data and write a commented recipe that `fit` takes as it is.

    Args:
        clicks: interactions: a Parquet, CSV or TSV file, or a directory or glob of them.
        out: the recipe to write; must not exist.
        queries, labels: feature tables, keyed by the columns of ids in `clicks`.
        query_id, label_id, timestamp, event: columns of `clicks`; those not given are found out.

    Returns:
        The columns as found.

    Raises:
        RecipeError: `out` is already there.
        DataError: a file that cannot be read, no columns of ids, or ids that the tables do not have, have twice or
            have in another type.
    """
    if out.exists():
        raise RecipeError(f"{out} already exists: expected a path that is free; nothing was changed")
    if not out.parent.is_dir():
        raise RecipeError(f"{out}: expected a directory {out.parent}, found none")
    log = read_table(clicks)
    tables = {side: read_table(path) for side, path in (("query", queries), ("label", labels)) if path is not None}
    given = {"query_id": query_id, "label_id": label_id, "timestamp": timestamp, "event": event}
    names = {side: tables[side].column_names if side in tables else [] for side in ("query", "label")}
    roles = roles_of(log, clicks, given, query_columns=names["query"], label_columns=names["label"])
    for side, path, name in (("query", queries, roles.query_id), ("label", labels, roles.label_id)):
        if path is not None:
            _check_table(tables[side], path, log, clicks, name)
    sizes = _sizes(log, clicks, roles)
    text = _recipe(clicks, out, log, roles, sizes, tables, {"queries": queries, "labels": labels})
    with out.open("x", encoding="utf-8") as file:
        file.write(text)
    load_recipe(out)  # what is written is a recipe
    return roles


def _check_table(table: pa.Table, path: Path, log: pa.Table, clicks: Path, name: str) -> None:
    """Refuse a feature table whose ids `fit` would refuse."""
    if name not in table.column_names:
        raise DataError(
            f"{path}: expected a column {name!r}, the ids of {clicks}, found {', '.join(table.column_names)}: "
            "rename it in one of the two"
        )
    kinds = {}
    for file, kind in ((clicks, log.schema.field(name).type), (path, table.schema.field(name).type)):
        if file.suffix == ".parquet":
            kinds[file] = "strings" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "integers"
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{kind} in {file}" for file, kind in kinds.items())
        raise DataError(f"column {name!r}: expected ids of one type in all Parquet files, found {found}")


def _sizes(log: pa.Table, clicks: Path, roles: Roles) -> Sizes:
    """Counts of the log.

    Raises:
        DataError: no row has both ids.
    """
    ids = log.select([roles.query_id, roles.label_id])
    kept = ids.filter(pc.and_(pc.is_valid(ids[0]), pc.is_valid(ids[1])))
    if not len(kept):
        raise DataError(f"{clicks}: expected rows with both {roles.query_id!r} and {roles.label_id!r}, found none")
    rows_Q, rows_L = (column.combine_chunks().dictionary_encode().indices.to_numpy() for column in kept.columns)
    pairs = distinct(rows_Q.astype(np.int64) * (int(rows_L.max(initial=0)) + 1) + rows_L)
    each = np.bincount(rows_Q)
    bad = len(log) - len(kept)
    return Sizes(len(log), len(each), len(distinct(rows_L)), len(pairs), float(np.median(each[each > 0])), bad)


def _recipe(
    clicks: Path, out: Path, log: pa.Table, roles: Roles, sizes: Sizes, tables: dict[str, pa.Table],
    paths: dict[str, Path | None],
) -> str:  # fmt: skip
    """The text of a recipe."""
    taken = {"history", roles.query_id, roles.label_id}
    of_queries = columns_of(tables.get("query"), roles.query_id, taken)
    of_labels = columns_of(tables.get("label"), roles.label_id, taken)
    described = bool(of_labels.features)
    label = label_tower(of_labels, roles)
    query = query_tower(of_queries, roles, sizes, described=described)
    places = {"train": clicks, **{name: path for name, path in paths.items() if path is not None}}
    batch = next(
        (size for rows, size in ((50_000, 512), (300_000, 1024), (3_000_000, 2048)) if sizes.rows < rows), 4096
    )
    epochs, patience = (30, 3) if sizes.rows < 3_000_000 else (10, 2)
    k = next((k for k in (20, 10, 5, 2) if k * 2 <= sizes.labels), 1)
    repeats = 1 - sizes.distinct / max(sizes.rows - sizes.bad, 1)
    data = [
        f"{name} = {quoted(os.path.relpath(path.resolve(), out.parent.resolve()))}" for name, path in places.items()
    ]
    data += [f"query_id = {quoted(roles.query_id)}{_guess('query_id', roles)}"]
    data += [f"label_id = {quoted(roles.label_id)}{_guess('label_id', roles)}"]
    times = _read_times(log, roles)
    data += _split(log, roles, sizes, times)
    data += _events(log, roles, None if times is None else _half_life(log, roles, times))
    data += [f"# {repeats:.0%} of the rows are a pair that is there already."]
    data += [f'repeats = "{"drop" if repeats > 0.05 else "keep"}"']
    data += _bad_rows(log, roles, sizes)
    if shown := _display(tables.get("label"), roles):
        data += [f"display = {json.dumps(shown, ensure_ascii=False)}  # shown in answers"]
    unread = [name for name in log.column_names if name not in vars(roles).values()]
    if unread:
        data += [f"# Not read: {', '.join(unread)}."]
    ks = "" if k == 20 else f"ks = {[each for each in (1, 2, 5, 10, 20) if each <= max(sizes.labels, 1)]}\n"
    return f"""# {clicks.name}: {sizes.rows:,} interactions of {sizes.queries:,} queries with {sizes.labels:,} labels.
# Written by `longtail-train init`: what it saw is in the comments; change what it could not know.
# Run      longtail-train fit {out.name} --out runs/{_name(clicks)}
name = {quoted(_name(clicks))}

[data]
{_joined(data)}

[query]
{tower_text(query)}

[label]
{tower_text(label)}

[model]
dim = {WIDTH}
{_model(described)}

[loss]
# The other labels of a batch are the negatives. They come by popularity, and so λ has all of it to give back.
sampler = "in_batch"
weight = "unit"

[optimizer]
embedding_learning_rate = {0.002 if described else 0.01}
dense_learning_rate = 0.001

[training]
# {sizes.rows // batch:,} steps an epoch. Stops {patience} epochs after recall on valid last rose; that epoch is kept.
epochs = {epochs}
batch_size = {batch}
patience = {patience}
refit = true  # then train again on train + valid

[evaluation]
{ks}metric = "recall@{k}"
# A query's training labels are not in its lists. Where people come back for the same label, say false.
exclude_seen = true
{_grid(described)}# floor = {{ tail = 0.02 }}  # least recall of the tail on valid: the default λ is the best with it
# Reported beside the model, so that nobody serves one that is worse.
baselines = ["popularity", "recent popularity", "item-kNN", "iALS"]
"""


def _model(described: bool) -> str:
    """How scores are made: of lengths, too, where a query's is of what is known of it, by all that its labels are."""
    if not described:
        return "temperature = 0.2"
    return "\n".join(
        [
            'similarity = "dot"  # a query of which little is known has a short vector, and popularity decides',
            "temperature = 0.2",
            "init_scale = 0.01",
        ]
    )


def _grid(described: bool) -> str:
    """The λ that are tried; where a vector's length counts, scores are smaller than log-odds, and popularity's share
    may have to be larger."""
    return "bias_removal = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]\n" if described else ""


def _bad_rows(log: pa.Table, roles: Roles, sizes: Sizes) -> list[str]:
    """What becomes of bad rows, and ids that name nobody."""
    lines = [f"# {sizes.bad:,} rows lack an id."] if sizes.bad else []
    lines += ['on_bad_row = "drop"  # up to 5 % of the rows; `longtail-train check` lists them']
    ids = (log[roles.query_id], log[roles.label_id])
    texts = [each for each in ids if pa.types.is_string(each.type) or pa.types.is_large_string(each.type)]
    distinct = [pc.unique(text.drop_null()).cast(pa.string()) for text in texts]
    values = {value for each in distinct for value in each.filter(pa.array(like_placeholders(each))).to_pylist()}
    if named := sorted(values - {""}):
        lines += [f"placeholders = {json.dumps(named, ensure_ascii=False)}  # rows of these are bad, too"]
    return lines


class _Times(NamedTuple):
    """The column of times: float64 [N], their unit if it is known, and which are plausible, bool [N]."""

    times_N: Float64
    unit: str | None
    good_N: Bools


def _read_times(log: pa.Table, roles: Roles) -> _Times | None:
    """The times of a log; None without a column of them."""
    if roles.timestamp is None:
        return None
    times_N = as_times(log[roles.timestamp])
    if times_N is None or not np.isfinite(times_N).any():
        kind = log.schema.field(roles.timestamp).type
        raise DataError(f"column {roles.timestamp!r}: expected times as numbers, dates or ISO 8601 text, found {kind}")
    now = datetime.now(UTC)
    unit = unit_of([times_N], now=now)
    return _Times(times_N, unit, np.isfinite(times_N) if unit is None else ~implausible(times_N, unit, now=now))


def _split(log: pa.Table, roles: Roles, sizes: Sizes, times: _Times | None) -> list[str]:
    """The split, and the column of times."""
    if roles.timestamp is None or times is None:
        odd = [name for name in log.column_names if words_of(name) & TIME_WORDS]
        hint = f" {', '.join(odd)}: expected numbers, dates or ISO 8601 text in most rows." if odd else ""
        return [
            f"# No column of times was found, so pairs are held out by chance.{hint}",
            'split = { strategy = "random" }',
        ]
    times_N, unit, good_N = times
    first, last = (in_words(float(at), unit) for at in (times_N[good_N].min(), times_N[good_N].max()))
    bad = f", not in {int((~good_N).sum()):,} rows" if not good_N.all() else ""
    share = 0.05 if sizes.rows >= 500_000 else 0.1
    return [
        f"timestamp = {quoted(roles.timestamp)}  # {first} to {last}{bad}",
        "# The latest pairs are held out: a model is asked about days that it has not seen.",
        f'split = {{ strategy = "temporal", valid = {share}, test = {share} }}',
    ]


def _half_life(log: pa.Table, roles: Roles, times: _Times) -> HalfLife | None:
    """How fast what is wanted passes; None where times are no dates."""
    times_N, unit, good_N = times
    if unit is None:
        return None
    known_N = np.asarray(pc.is_valid(log[roles.label_id])) & good_N
    labels_N = log[roles.label_id].filter(known_N).combine_chunks().dictionary_encode().indices.to_numpy()
    return half_life_of(labels_N, times_N[known_N] / (UNITS[unit] * _SECONDS_A_DAY))


def _events(log: pa.Table, roles: Roles, half_life: HalfLife | None) -> list[str]:
    """What pairs weigh, by the column of events and by age."""
    passing, decay = [], ""
    if half_life is not None:
        passing = [
            f"# What is wanted passes: popularity by events that weigh half after {half_life.span} predicts later ones",
            f"# {half_life.gain:.2f} nats better than by all alike. A longer one forgets less of what people like.",
        ]
        decay = f'half_life = "{half_life.span}"'
    if roles.event is None:
        return [*passing, f"events = {{ {decay} }}"] if decay else []
    counts = sorted(pc.value_counts(log[roles.event]).to_pylist(), key=lambda found: -found["counts"])
    shares = ", ".join(f"{found['values'] or 'none'} {found['counts'] / len(log):.0%}" for found in counts[:10])
    lines = [f"# Column {roles.event}: {shares}."]
    weights = {found["values"]: _event_weight(found["values"]) for found in counts if found["values"]}
    table = ", ".join(f"{quoted(name)} = {weight}" for name, weight in weights.items())
    decay = decay and f", {decay}"
    return [*lines, *passing, f"events = {{ column = {quoted(roles.event)}, weights = {{ {table} }}{decay} }}"]


def _event_weight(name: str) -> int:
    return max((_EVENT_WEIGHTS[word] for word in words_of(name) & _EVENT_WEIGHTS.keys()), default=1)


def _display(table: pa.Table | None, roles: Roles) -> list[str]:
    """Columns of the label table that a person knows a label by."""
    if table is None:
        return []
    strings = [field.name for field in table.schema if pa.types.is_string(field.type)]
    named = [name for name in strings if words_of(name) & _TITLES and name not in (roles.label_id, *RESERVED_COLUMNS)]
    return named[:3]


def _guess(role: str, roles: Roles) -> str:
    return "  # a guess, by the number of its values" if role in roles.guessed else ""


def _name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "job"


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)
