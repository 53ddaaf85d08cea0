"""Draft of a recipe with reasons, from a log and its feature tables."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from longtail.tables import DataFile, EmptyFileError, find_files
from longtail.tables.database import Database, OpenedFile, open_database
from longtail.tables.table import all_columns, open_file, read_table
from longtail.trainer.config import Recipe, load_recipe
from longtail.trainer.config.rows import name_sources
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.interactions import EVENT, FEEDBACK_COLUMNS, IMPRESSIONS, ROLE_COLUMNS, TIME
from longtail.trainer.data.prepared import read_dataset
from longtail.trainer.errors import DataError, RecipeError
from longtail.trainer.init import sections
from longtail.trainer.init.columns import (
    KINDS,
    Roles,
    assign_roles,
    is_stock,
    profile_column,
)
from longtail.trainer.init.events import draft_ratings
from longtail.trainer.init.sections import MOST_BAD_ROWS, WIDTH

_SHRINKAGE, _MOST_SHRUNK = 30, 0.001
"""`l2` times the number of training pairs, and the most that `l2` may be."""
_PERIODS = 8
"""Parts of the time of training, where popularity passes."""
_MOST_REPEATS = 0.05
"""Share of repeated pairs from which repeats are dropped."""


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
        raise RecipeError(
            f"{out} already exists: expected a path that is free; nothing was changed; choose another, or delete it"
        )
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
    settings = tomllib.loads(sections.join_lines(data)) | {"repeats": "drop", "max_bad_rows": 1.0}
    settings |= {key: [str(path.resolve()) for path in files] for key, files in paths.items()}
    query = {"features": [{"name": "history", "kind": "history", "table": roles.label_id}]}
    label = {"features": [{"name": roles.label_id, "kind": "id"}, *labels]}
    tree = {"name": "draft", "data": settings, "query": query, "label": label, "prior": prior}
    recipe = Recipe.model_validate(tree)
    return recipe, read_dataset(recipe)


def _recipe(
    out: Path, log: pa.Table, choices: pa.Table | None, roles: Roles, tables: Mapping[str, pa.Table],
    paths: Mapping[str, Sequence[Path]],
) -> str:  # fmt: skip
    if not sections.is_feature_name(roles.label_id):
        raise DataError(f"column {roles.label_id!r}: expected a name of letters, digits and _ for label ids: rename it")
    data = []
    for key, files in paths.items():
        relative = [os.path.relpath(path.resolve(), out.parent.resolve()) for path in files]
        data.append(f"{key} = {sections.to_toml(relative if len(relative) > 1 else relative[0])}")
    # A twentieth of many pairs measures well enough, and leaves more to train on.
    held_out = 0.05 if len(log) >= 500_000 and roles.timestamp else 0.1
    data += sections.draft_data(log, choices, roles, held_out)
    used_names = {"history", roles.query_id, roles.label_id}
    profiles = {
        key: [profile_column(name, table[name]) for name in table.column_names] for key, table in tables.items()
    }
    of_queries, left_out = sections.name_features(profiles.get("queries", []), roles.query_id, used_names)
    stock = [it.name for it in profiles.get("labels", []) if is_stock(it)]
    lasting = [it for it in profiles.get("labels", []) if it.name not in stock]
    of_labels, no_label = sections.name_features(lasting, roles.label_id, used_names)
    if stock:
        no_label.insert(0, f"{', '.join(stock)}: stock changes after training, so requests filter by it")
    read = [
        {"name": name, "kind": KINDS[profile.content], "column": profile.name}
        for name, profile in of_labels
        if KINDS[profile.content] in ("id", "number")
    ]
    dates = [
        it.name for it in profiles.get("labels", []) if it.content == "date" and sections.is_availability_start(it.name)
    ]
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
    data += [*([f"# {bad}."] if report.dropped > MOST_BAD_ROWS * report.read else []),
             f"# {repeats:.0%} of the rows repeat an earlier pair.",
             f'repeats = "{"drop" if drop else "keep"}"', *unlisted]  # fmt: skip
    if "labels" in tables:
        data += sections.draft_label_columns(
            tables["labels"], profiles["labels"], roles.label_id, name_sources([*paths["labels"]])
        )
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
    served, prior = sections.draft_prior(draft, dataset)
    passes = described and served != "count"
    periods = f"periods = {_PERIODS}  # batches of one time each: towers do not learn what passes\n" if passes else ""
    k = next((k for k in (20, 10, 5, 2) if k * 2 <= labels), 1)
    ks = "" if k == 20 else f"ks = {[k for k in (1, 2, 5, 10, 20) if k <= max(labels, 1)]}\n"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", paths["train"][0].stem).lstrip("._-") or "job"
    source = name_sources([path.name for path in paths["train"]])
    history = {"name": "history", "kind": "history", "table": roles.label_id, "dim": WIDTH, "max_length": 50}
    query = ["# Labels that the query chose before. A query that is not in training is known by these alone."]
    label, label_feature = [], {"name": roles.label_id, "kind": "id", "dim": WIDTH}
    if described:
        history |= {"entries": "both", "damping": 5}
        query.append(
            "# Entries are read by id and features: labels of one brand are alike. Damping shrinks short histories."
        )
        label.append("# Training makes one id in twenty unknown, so that new labels are found by their features.")
        label_feature["unknown_rate"] = 0.05
    query.append(f"{sections.to_toml(history)},")
    label.append(f"{sections.to_toml(label_feature)},")
    if median >= 3 and sections.is_feature_name(roles.query_id):
        query.insert(0, f"{sections.to_toml({'name': roles.query_id, 'kind': 'id', 'dim': WIDTH})},")
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
    return f"""{sections.join_lines(about)}
# Written by `longtail-train init`, with its reasons in the comments.
# Run      longtail-train fit {out.name} --out runs/{name}
name = {sections.to_toml(name)}

[data]
{sections.join_lines(data)}

[query]
{sections.draft_tower(of_queries, left_out, query)}

[label]
{sections.draft_tower(of_labels, no_label, label, ranges=True)}

[model]
dim = {WIDTH}
{dot if described else ""}temperature = "auto"  # the best on valid of a few short runs

[loss]
# The other labels of a batch are the negatives, drawn by popularity. λ gives the popularity back.
sampler = "in_batch"
weight = "unit"

{sections.join_lines(prior)}
{sections.join_lines(sections.draft_cooccurrence(draft, dataset))}
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
baselines = {sections.to_toml(baselines)}
"""
