"""Draft of a recipe with reasons, from a log and its feature tables."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomlkit

from longtail.bundle.filterable import filter_kind
from longtail.bundle.ids import is_text
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.bundle.lifetimes import NO_LIMITS
from longtail.tables import DataFile, EmptyFileError, find_files
from longtail.tables.database import Database, OpenedFile, open_database
from longtail.tables.table import all_columns, open_file, read_table
from longtail.tables.times import format_time
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.config.rows import name_sources
from longtail.trainer.cooccurrence import measure_term_alone
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.ids import find_placeholders
from longtail.trainer.data.interactions import EVENT, FEEDBACK_COLUMNS, IMPRESSIONS, ROLE_COLUMNS, TIME, WEIGHT
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.init.columns import (
    KINDS,
    TIME_WORDS,
    ColumnProfile,
    Roles,
    assign_roles,
    is_stock,
    profile_column,
    read_times,
    spelled,
    split_words,
)
from longtail.trainer.init.events import draft_events, draft_ratings
from longtail.trainer.prior import fit_forecast

_WIDTH = 64
"""Width of embeddings and of the model."""
_SECONDS_A_DAY = 86_400
_LEAST_PAIRS, _LEAST_GAIN, _LEAST_FORECAST_GAIN = 1000, 0.02, 0.01
"""Least number of pairs to measure a prior; least gain of a prior over counts, and of a forecast over decay, nats."""
_TOP = 20
"""Length of the lists by which the term of co-occurrence is compared with popularity."""
_SHRINKAGE, _MOST_SHRUNK = 30, 0.001
"""`l2` times the number of training pairs, and the most that `l2` may be."""
_PERIODS = 8
"""Parts of the time of training, where popularity passes."""
_MOST_REPEATS, _MOST_BAD_ROWS = 0.05, 0.05
"""Share of repeated pairs from which repeats are dropped, and share of bad rows that the recipe skips."""
_TITLES = {"title", "name", "brand", "headline", "label"}
_MOST_TITLES, _MOST_SHOWN = 3, 10
_SINCE = re.compile(r"creat|added|\badd\b|avail|publi[sc]|releas|launch|listed|first ?seen|since|introduc|onboard"
                    r"|upload|posted|premier|debut|issued|insert|arriv|\bfrom\b|\bstart")  # fmt: skip
_UNTIL = re.compile(r"updat|modif|delet|remov|expir|until|\bto\b|\bend|\blast|clos|discontinu|birth|changed")
"""Words in the name of a date from which a label is available, and words of other dates."""


def draft_recipe(
    clicks: Path | Sequence[Path], out: Path, *, queries: Path | None = None, labels: Path | None = None,
    query_id: str | None = None, label_id: str | None = None, timestamp: str | None = None, event: str | None = None,
) -> Roles:  # fmt: skip
    """Examine the data and write a commented recipe for `fit`; return the roles of columns.

    Args:
        clicks: interactions: a Parquet, CSV or TSV file, a directory or glob of these, or several; exports of a
            service's feedback, with or without a log.
        out: the recipe to write; must not exist.
        queries, labels: feature tables, keyed by the columns of ids in `clicks`.
        query_id, label_id, timestamp, event: columns of `clicks`; other roles are detected.
    """
    if out.exists():
        raise RecipeError(f"{out} already exists: expected a path that is free; nothing was changed")
    if not out.parent.is_dir():
        raise RecipeError(f"{out}: expected a directory {out.parent}, found none")
    sources = [clicks] if isinstance(clicks, Path) else list(clicks)
    source_name = name_sources([*sources])
    files = find_files([*sources])
    with open_database() as reader:
        exports = [file for file in files if _is_export(reader, file)]
    logs = [file for file in files if file not in exports]
    log = _table(logs or exports, source_name)
    choices = _table(exports, source_name, [EVENT, IMPRESSIONS]) if exports else None
    if not logs:
        columns = log.column_names
        label_id = label_id or ("label_id" if "label_id" in columns else columns[columns.index("answer") - 1])
        log = log.drop_columns([*{*ROLE_COLUMNS} & {*columns} - {TIME, query_id, timestamp, event}])
    chosen = {"query_id": query_id, "label_id": label_id, "timestamp": timestamp, "event": event}
    feature_tables = {"queries": queries, "labels": labels}
    tables = {key: _table(find_files(path), str(path)) for key, path in feature_tables.items() if path is not None}
    names = {key: tables[key].column_names if key in tables else [] for key in feature_tables}
    roles = assign_roles(log, source_name, chosen, query_columns=names["queries"], label_columns=names["labels"])
    for key, name in (("queries", roles.query_id), ("labels", roles.label_id)):
        if key in tables and name not in names[key]:
            columns = ", ".join(names[key])
            raise DataError(
                f"{feature_tables[key]}: expected a column {name!r}, the ids of {source_name}, found {columns}: "
                "rename it"
            )
    paths = {"train": sources, **{key: [path] for key, path in feature_tables.items() if path}}
    text = _recipe(out, log, choices, roles, tables, paths)
    # `x` never replaces a recipe that exists.
    with out.open("x", encoding="utf-8") as file:
        file.write(text)
    load_recipe(out)  # a check of the written file
    return roles


def _is_export(reader: Database, file: DataFile) -> bool:
    try:
        return {*open_file(reader, file).names} >= FEEDBACK_COLUMNS
    except EmptyFileError:
        return False


def _table(files: Sequence[DataFile], source_name: str, names: Sequence[str] | None = None) -> pa.Table:
    """Read columns of some files with their types; None reads all."""

    def columns_of_file(opened: OpenedFile, number: int) -> dict[str, tuple[str, str]]:
        return all_columns(opened, number) if names is None else {name: opened.column(name) for name in names}

    with open_database() as reader:
        table = read_table(reader, files, columns_of_file, source_name)
        if not table.rows:
            raise DataError(f"{source_name}: expected at least one row, found none")
        table.find_types()
        return table.arrow([*table.kinds])


def _read(
    data: list[str], paths: Mapping[str, Sequence[Path]], roles: Roles, prior: Mapping[str, Any], labels: Sequence[Any]
) -> tuple[Recipe, Dataset]:
    """Read the data by the lines drafted so far, with any share of bad rows.

    Label columns that a prior may use are read too.
    """
    settings = tomllib.loads(_joined(data)) | {"repeats": "drop", "max_bad_rows": 1.0}
    settings |= {key: [str(path.resolve()) for path in files] for key, files in paths.items()}
    query = {"features": [{"name": "history", "kind": "history", "table": roles.label_id}]}
    label = {"features": [{"name": roles.label_id, "kind": "id"}, *labels]}
    sections = {"name": "draft", "data": settings, "query": query, "label": label, "prior": prior}
    recipe = Recipe.model_validate(sections)
    return recipe, read_dataset(recipe)


def _recipe(
    out: Path, log: pa.Table, choices: pa.Table | None, roles: Roles, tables: Mapping[str, pa.Table],
    paths: Mapping[str, Sequence[Path]],
) -> str:  # fmt: skip
    if not _is_feature(roles.label_id):
        raise DataError(f"column {roles.label_id!r}: expected a name of letters, digits and _ for label ids: rename it")
    data = []
    for key, files in paths.items():
        relative = [os.path.relpath(path.resolve(), out.parent.resolve()) for path in files]
        data.append(f"{key} = {_toml(relative if len(relative) > 1 else relative[0])}")
    # A twentieth of many pairs measures well enough, and leaves more to train on.
    held_out = 0.05 if len(log) >= 500_000 and roles.timestamp else 0.1
    data += _data(log, choices, roles, held_out)
    used_names = {"history", roles.query_id, roles.label_id}
    profiles = {
        key: [profile_column(name, table[name]) for name in table.column_names] for key, table in tables.items()
    }
    of_queries, left_out = _features(profiles.get("queries", []), roles.query_id, used_names)
    stock = [it.name for it in profiles.get("labels", []) if is_stock(it)]
    lasting = [it for it in profiles.get("labels", []) if it.name not in stock]
    of_labels, no_label = _features(lasting, roles.label_id, used_names)
    if stock:
        no_label.insert(0, f"{', '.join(stock)}: stock changes after training, so requests filter by it")
    read = [
        {"name": name, "kind": KINDS[profile.content], "column": profile.name}
        for name, profile in of_labels
        if KINDS[profile.content] in ("id", "number")
    ]
    dates = [it.name for it in profiles.get("labels", []) if it.content == "date" and _begins(it.name)]
    since = dates[0] if dates else None
    tried: dict[str, Any] = {"kind": "forecast", "features": [feature["name"] for feature in read], "since": since}
    draft, dataset = _read(data, paths, roles, tried if roles.timestamp else {}, read)
    report, queries, labels = dataset.report, len(dataset.query_ids), len(dataset.label_ids)
    pairs_Q = np.bincount(np.concatenate([pairs.queries for pairs in (dataset.train, dataset.valid, dataset.test)]))
    median, pairs = np.median(pairs_Q[pairs_Q > 0]), int(pairs_Q.sum())
    repeats = report.repeats / (pairs + report.repeats)
    drop = repeats > _MOST_REPEATS
    described = bool(of_labels)
    bad = f"{report.dropped / report.read:.0%} of the rows are bad: mend them, or allow as many by max_bad_rows"
    unlisted = [
        f"# {without:,} of the {every:,} {side} have no row in {name_sources([*paths[side]])}{example}."
        for side, (without, every, example) in report.unlisted.items()
    ]
    data += [*([f"# {bad}."] if report.dropped > _MOST_BAD_ROWS * report.read else []),
             f"# {repeats:.0%} of the rows repeat an earlier pair.",
             f'repeats = "{"drop" if drop else "keep"}"', *unlisted]  # fmt: skip
    if "labels" in tables:
        data += _label_columns(tables["labels"], profiles["labels"], roles.label_id, name_sources([*paths["labels"]]))
    unread = [name for name in log.column_names if name not in roles]
    data += [
        *draft_ratings(log, os.path.relpath(paths["train"][0].resolve(), out.parent.resolve())),
        *([f"# Not read: {', '.join(unread)}."] if unread else []),
    ]
    remarks = (report if drop else replace(report, repeats=0)).lines()[:1]
    head = [f"# {line}" for line in remarks if line.startswith("Left out")]
    limits = ((50_000, 512), (300_000, 1024), (3_000_000, 2048))
    batch = next((size for most, size in limits if report.read < most), 4096)
    epochs, patience = (30, 3) if report.read < 3_000_000 else (10, 2)
    trained = (1 - 2 * held_out) * (pairs if drop else pairs + report.repeats)
    l2 = min(_SHRINKAGE / max(trained, 1), _MOST_SHRUNK)
    rule = f"{_SHRINKAGE} / training pairs, at most {_MOST_SHRUNK}"
    shrunk = f"l2 = {l2:.1g}  # {rule}: rows of few pairs stay short\n" if described else ""
    served, prior = draft_prior(draft, dataset)
    passes = described and served != "count"
    periods = f"periods = {_PERIODS}  # batches of one time each: towers do not learn what passes\n" if passes else ""
    k = next((k for k in (20, 10, 5, 2) if k * 2 <= labels), 1)
    ks = "" if k == 20 else f"ks = {[k for k in (1, 2, 5, 10, 20) if k <= max(labels, 1)]}\n"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", paths["train"][0].stem).lstrip("._-") or "job"
    source = name_sources([path.name for path in paths["train"]])
    history = {"name": "history", "kind": "history", "table": roles.label_id, "dim": _WIDTH, "max_length": 50}
    query = ["# Labels that the query chose before. A query that is not in training is known by these alone."]
    label, label_feature = [], {"name": roles.label_id, "kind": "id", "dim": _WIDTH}
    if described:
        history |= {"entries": "both", "damping": 5}
        query.append(
            "# Entries are read by id and features: labels of one brand are alike. Damping shrinks short histories."
        )
        label.append("# Training makes one id in twenty unknown, so that new labels are found by their features.")
        label_feature["unknown_rate"] = 0.05
    query.append(f"{_toml(history)},")
    label.append(f"{_toml(label_feature)},")
    if median >= 3 and _is_feature(roles.query_id):
        query.insert(0, f"{_toml({'name': roles.query_id, 'kind': 'id', 'dim': _WIDTH})},")
    else:
        few = f"half of the queries have {median:g} pairs or fewer, too few for a row"
        left_out.insert(0, f"{roles.query_id}: {few}")
    shares = ["attribute share"] if any(KINDS[profile.content] == "id" for _, profile in of_labels) else []
    baselines = ["popularity", "recent popularity", *shares, "item-kNN", "RP3beta", "EASE", "Turbo-CF", "iALS"]
    # With dot products, scores are smaller than log-odds, and popularity may need a larger λ.
    dot = (
        'similarity = "dot"  # a query of which little is known has a short vector, and popularity decides\n'
        "init_scale = 0.01\n"
    )
    about = [f"# {source}: {report.read:,} rows, {queries:,} queries × {labels:,} labels.", *head]
    return f"""{_joined(about)}
# Written by `longtail-train init`, with its reasons in the comments.
# Run      longtail-train fit {out.name} --out runs/{name}
name = {_toml(name)}

[data]
{_joined(data)}

[query]
{_tower(of_queries, left_out, query)}

[label]
{_tower(of_labels, no_label, label, ranges=True)}

[model]
dim = {_WIDTH}
{dot if described else ""}temperature = "auto"  # the best on valid of a few short runs

[loss]
# The other labels of a batch are the negatives, drawn by popularity. λ gives the popularity back.
sampler = "in_batch"
weight = "unit"

{_joined(prior)}
{_joined(draft_cooccurrence(draft, dataset))}
[optimizer]
embedding_learning_rate = {0.002 if described else 0.01}
dense_learning_rate = 0.001
{shrunk}
[training]
# About {trained / batch:,.0f} steps an epoch. Stops {patience} epochs after recall on valid was best; that one is kept.
epochs = {epochs}
batch_size = {batch}
{periods}patience = {patience}
refit = true  # then train again on train + valid

[evaluation]
{ks}metric = "recall@{k}"
# Lists leave out a query's training labels. Say false if people choose the same label again.
exclude_seen = true
bias_removal = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2]  # λ that are tried on valid
# floor = {{ tail = 0.02 }}  # least recall of the tail on valid: the default λ is the best with it
# Reported with the model, to show whether it is better than simple methods.
baselines = {_toml(baselines)}
"""


def _data(log: pa.Table, choices: pa.Table | None, roles: Roles, held_out: float) -> list[str]:
    """Draft ids, split, weights and bad rows."""
    guesses = dict.fromkeys(roles.guessed, "  # a guess, by the number of its values")
    lines = [f"{role} = {_toml(getattr(roles, role))}{guesses.get(role, '')}" for role in ("query_id", "label_id")]
    if roles.timestamp is None:
        odd = [name for name in log.column_names if split_words(name) & TIME_WORDS]
        hint = f" {', '.join(odd)}: expected numbers, dates or ISO 8601 text in most rows." if odd else ""
        lines += [f"# No column of times was found, so pairs are held out by chance.{hint}",
                  f'split = {{ strategy = "random", valid = {held_out}, test = {held_out} }}']  # fmt: skip
    else:
        lines += _split(log, roles.timestamp, held_out)
    if roles.event is not None:
        columns = [log[roles.event], *([] if choices is None else [choices[EVENT]])]
        types = pa.chunked_array([chunk for column in columns for chunk in column.cast(pa.string()).chunks])
        of_types, weights = draft_events(roles.event, types)
        lines += [*of_types, f"events = {_toml({'column': roles.event, 'weights': weights})}"]
    if choices is not None:
        lines += [f"# {len(choices):,} choices in a service weigh 1 / the chance of being shown there, other rows 1.",
                  f"weight = {_toml(WEIGHT)}"]  # fmt: skip
        if choices[IMPRESSIONS].null_count < len(choices):
            lines += ["# What the answers showed. `loss.impressions = 1` makes what was not chosen negatives.",
                      f"impressions = {_toml(IMPRESSIONS)}"]  # fmt: skip
    lines += [f"max_bad_rows = {_MOST_BAD_ROWS}  # of the rows are left out; `longtail-train check` lists them"]
    texts = [log[name] for name in (roles.query_id, roles.label_id) if is_text(log.schema.field(name).type)]
    unique = [pc.unique(text.drop_null()).cast(pa.string()) for text in texts]
    placeholders = {value for texts in unique for value in find_placeholders(texts)} - {""}
    lines += [f"placeholders = {_toml(sorted(placeholders))}  # rows with these ids are bad"] if placeholders else []
    return lines


def _label_columns(table: pa.Table, profiles: list[ColumnProfile], label_id: str, source_name: str) -> list[str]:
    """Draft columns for answers: titles, then columns for filters of requests; name dates of first availability."""
    profiles = [it for it in profiles if it.name not in (label_id, *RESERVED_COLUMNS)]
    kinds = {it.name: filter_kind(table.schema.field(it.name).type) for it in profiles}
    titles = [
        profile.name for profile in profiles if kinds[profile.name] == "string" and split_words(profile.name) & _TITLES
    ]
    stock = [
        profile.name
        for profile in profiles
        if kinds[profile.name] is not None and (is_stock(profile) or profile.name in NO_LIMITS)
    ]
    displayed = titles[:_MOST_TITLES]
    for profile in profiles:
        alike = profile.content in ("nothing", "one value in every row")
        ordered = kinds[profile.name] in ("number", "date", "strings") and not alike
        few = profile.name in stock or ordered or profile.content == "category" or kinds[profile.name] == "boolean"
        displayed += [profile.name] if few and profile.name not in titles else []
    others = [name for name in displayed if name not in stock][: max(_MOST_SHOWN - len(stock), 0)]
    displayed = [name for name in displayed if name in (*stock, *others)]
    lines = [f"display = {_toml(displayed)}  # in answers, and what requests filter by"] if displayed else []
    for profile in profiles:
        if not _begins(profile.name):
            continue
        if profile.content == "date" or (
            (times := read_times(table[profile.name])) is not None and times.unit is not None
        ):
            lines.append(f"# By its name, {profile.name} in {source_name} is since when a label is there.")
    return lines


def _begins(name: str) -> bool:
    """Return whether a date, by its name, begins a label's availability."""
    words = " ".join(spelled(name))
    return bool(_SINCE.search(words)) and not _UNTIL.search(words)


def _split(log: pa.Table, timestamp: str, held_out: float) -> list[str]:
    """Draft the split by time."""
    times = read_times(log[timestamp])
    if times is None:
        return [f"timestamp = {_toml(timestamp)}"]  # reading will refuse these times with a full message
    times_N, good_N, unit = times
    first, last = (format_time(float(time), unit) for time in (times_N[good_N].min(), times_N[good_N].max()))
    bad = f", not in {int((~good_N).sum()):,} rows" if not good_N.all() else ""
    return [
        f"timestamp = {_toml(timestamp)}  # {first} to {last}{bad}",
        "# The latest pairs are held out, as a model answers queries of days after its training.",
        f'split = {{ strategy = "temporal", valid = {held_out}, test = {held_out} }}',
    ]


def draft_prior(recipe: Recipe, dataset: Dataset) -> tuple[str, list[str]]:
    """Choose the kind of prior that predicts the latest training pairs best; also return its lines, with the reason."""
    known_pairs = dataset.train.merge_later(dataset.valid)
    if recipe.prior.kind == "count" or dataset.report.unit is None or len(known_pairs) < _LEAST_PAIRS:
        return "count", []
    try:
        settings = fit_forecast(recipe, dataset, known_pairs).settings
    except DataError as error:
        return "count", [f"# The popularity that training saw is served: {error}", ""]
    nats, days = settings.nats, settings.horizon / _SECONDS_A_DAY
    life = settings.half_lives[settings.base] / _SECONDS_A_DAY
    decayed, forecast = nats["decayed"] - nats["count"], nats["forecast"] - nats["count"]
    kind = "count"
    if max(decayed, forecast) >= _LEAST_GAIN:
        kind = "decayed" if forecast - decayed < _LEAST_FORECAST_GAIN else "forecast"
    calendar = settings.calendar
    if calendar is not None and calendar.gain < _LEAST_GAIN:
        calendar = None
    kind = kind if calendar is None else "forecast"
    lines = [
        f"# In the last {days:.3g} days before test, pairs are {forecast:+.2f} nats likelier by a forecast of",
        f"# popularity than by all earlier pairs alike, {decayed:+.2f} by pairs that weigh half after {life:.3g} days.",
    ]
    if kind == "count":
        return kind, [*lines, "# So popularity lasts, and that of training is served.", ""]
    if calendar is not None:
        when = " and ".join(calendar.windows)
        lines += [
            f"# By the hour they are {calendar.gain:+.2f} nats likelier by the {when} of each {calendar.feature}.",
            '# So serve with `longtail-serve run --refresh 1h`; never refreshed, kind = "count" may find more.',
        ]
    lines += ["[prior]", f'kind = "{kind}"  # what `popularity` of a request multiplies']
    if recipe.prior.since:
        lines.append(f"since = {_toml(recipe.prior.since)}  # by its name, since when a label is there")
    if kind == "forecast" and recipe.prior.features:
        lines.append(f"features = {_toml(recipe.prior.features)}")
    return kind, [*lines, ""]


def draft_cooccurrence(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Draft the term of co-occurrence, with what it finds alone in the pairs before test; empty if it finds nothing."""
    try:
        by_term, by_popularity = measure_term_alone(recipe, dataset, _TOP)
    except DataError:  # no query has a new label to find
        return []
    words = [
        f"# In {_TOP} places, what was chosen with a query's last labels finds {by_term:.1%} of the pairs before",
        f"# test, popularity {by_popularity:.1%}.",
    ]
    if not by_term:
        return [*words, "# So the score has no term of co-occurrence.", ""]
    return [
        *words,
        "[cooccurrence]",
        "# `fit` chooses its settings and weight on valid: 0 where the gain is within chance.",
        "",
    ]


def _features(
    profiles: list[ColumnProfile], id_name: str, used_names: set[str]
) -> tuple[list[tuple[str, ColumnProfile]], list[str]]:
    """Name the columns of a feature table for a tower, without names in `used_names`; give reasons for the others."""
    features: list[tuple[str, ColumnProfile]] = []
    left_out = []
    for column in profiles:
        if column.name == id_name:
            continue
        if column.content not in KINDS:
            left_out.append(f"{column.name}: {column.content}")
            continue
        plain = "_".join(re.findall(r"[A-Za-z0-9]+", column.name))
        plain = plain if _is_feature(plain) else f"feature_{plain}".rstrip("_")
        name = next(it for it in chain([plain], (f"{plain}_{i}" for i in count(2))) if it not in used_names)
        used_names.add(name)
        features.append((name, column))
    return features, left_out


def _tower(
    features: list[tuple[str, ColumnProfile]], left_out: list[str], lines: list[str], *, ranges: bool = False
) -> str:
    """Draft a tower: its own lines, and lines of its table's features, numbers as they are or as ranges."""
    equal = all(KINDS[column.content] not in ("vector", *(() if ranges else ("number",))) for _, column in features)
    for name, column in features:
        keys: dict[str, Any] = {"name": name, "kind": KINDS[column.content]}
        if name != column.name:
            keys["column"] = column.name
        keys |= {"separator": column.separator} if column.separator else {}
        keys |= {"dims": column.dims} if column.dims else {}
        # Embeddings are small at first, and a standardised number of a label would drown them.
        ranged = ranges and keys["kind"] == "number"
        keys |= {"transform": "quantile"} if ranged else {}
        many = column.content == "category" and column.distinct > 1000
        if ranged or keys["kind"] not in ("number", "vector"):
            keys["dim"] = _WIDTH if equal or many or column.content in ("words", "joined", "bag") else 16
        if many:
            keys["min_count"] = 2
        values = f"{column.distinct:,} values" if column.distinct else column.content
        lines.append(f"{_toml(keys)},  # {values}{f', {column.nulls:,} missing' if column.nulls else ''}")
    why = "features of one width add up" if equal else "side by side, then one linear layer: no id is forgotten"
    combine = [f'combine = "{"sum" if equal else "concat"}"  # {why}', "features = ["]
    reasons = [f"# Left out: {reason}." for reason in left_out]
    return _joined([*reasons, *combine, *(f"    {line}" for line in lines), "]"])


def _is_feature(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*", name) is not None


def _joined(lines: Sequence[str]) -> str:
    """Join lines, without control characters, which names in comments may contain."""
    return "\n".join(re.sub(r"[\x00-\x1f\x7f]", " ", line) for line in lines)


def _toml(value: Any) -> str:
    """Format one value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{tomlkit.key(key).as_string()} = {_toml(item)}' for key, item in value.items())} }}"
    return str(tomlkit.item(value).as_string())
