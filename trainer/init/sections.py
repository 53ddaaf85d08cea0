"""Draft the lines of a recipe's sections, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tomlkit

from longtail.bundle.filterable import filter_kind
from longtail.bundle.ids import is_text
from longtail.bundle.labels import RESERVED_COLUMNS
from longtail.bundle.lifetimes import NO_LIMITS
from longtail.tables.times import format_time
from longtail.trainer.config import Recipe
from longtail.trainer.cooccurrence import measure_term_alone
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.ids import find_placeholders
from longtail.trainer.data.interactions import EVENT, IMPRESSIONS, WEIGHT
from longtail.trainer.errors import DataError
from longtail.trainer.init.columns import (
    KINDS,
    TIME_WORDS,
    ColumnProfile,
    Roles,
    is_stock,
    read_times,
    spelled,
    split_words,
)
from longtail.trainer.init.events import draft_events
from longtail.trainer.prior import fit_forecast

WIDTH = 64
"""Width of embeddings and of the model."""
MOST_BAD_ROWS = 0.05
"""Share of bad rows that the recipe skips."""
_SECONDS_A_DAY = 86_400
_LEAST_PAIRS, _LEAST_GAIN, _LEAST_FORECAST_GAIN = 1000, 0.02, 0.01
"""Least number of pairs to measure a prior; least gain of a prior over counts, and of a forecast over decay, nats."""
_TOP = 20
"""Length of the lists by which the term of co-occurrence is compared with popularity."""
_TITLES = {"title", "name", "brand", "headline", "label"}
_MOST_TITLES, _MOST_SHOWN = 3, 10
_SINCE = re.compile(r"creat|added|\badd\b|avail|publi[sc]|releas|launch|listed|first ?seen|since|introduc|onboard"
                    r"|upload|posted|premier|debut|issued|insert|arriv|\bfrom\b|\bstart")  # fmt: skip
_UNTIL = re.compile(r"updat|modif|delet|remov|expir|until|\bto\b|\bend|\blast|clos|discontinu|birth|changed")
"""Words in the name of a date from which a label is available, and words of other dates."""


def draft_data(log: pa.Table, choices: pa.Table | None, roles: Roles, held_out: float) -> list[str]:
    """Draft ids, split, weights and bad rows."""
    guesses = dict.fromkeys(roles.guessed, "  # a guess, by the number of its values")
    lines = [f"{role} = {to_toml(getattr(roles, role))}{guesses.get(role, '')}" for role in ("query_id", "label_id")]
    if roles.timestamp is None:
        odd = [name for name in log.column_names if split_words(name) & TIME_WORDS]
        hint = f" {', '.join(odd)}: expected numbers, dates or ISO 8601 text in most rows." if odd else ""
        lines += [f"# No column of times was found, so pairs are held out by chance.{hint}",
                  f'split = {{ strategy = "random", valid = {held_out}, test = {held_out} }}']  # fmt: skip
    else:
        lines += _draft_split(log, roles.timestamp, held_out)
    if roles.event is not None:
        columns = [log[roles.event], *([] if choices is None else [choices[EVENT]])]
        types = pa.chunked_array([chunk for column in columns for chunk in column.cast(pa.string()).chunks])
        of_types, weights = draft_events(roles.event, types)
        lines += [*of_types, f"events = {to_toml({'column': roles.event, 'weights': weights})}"]
    if choices is not None:
        lines += [f"# {len(choices):,} choices in a service weigh 1 / the chance of being shown there, other rows 1.",
                  f"weight = {to_toml(WEIGHT)}"]  # fmt: skip
        if choices[IMPRESSIONS].null_count < len(choices):
            lines += ["# What the answers showed. `loss.impressions = 1` makes what was not chosen negatives.",
                      f"impressions = {to_toml(IMPRESSIONS)}"]  # fmt: skip
    lines += [f"max_bad_rows = {MOST_BAD_ROWS}  # of the rows are left out; `longtail-train check` lists them"]
    texts = [log[name] for name in (roles.query_id, roles.label_id) if is_text(log.schema.field(name).type)]
    unique = [pc.unique(text.drop_null()).cast(pa.string()) for text in texts]
    placeholders = {value for texts in unique for value in find_placeholders(texts)} - {""}
    lines += [f"placeholders = {to_toml(sorted(placeholders))}  # rows with these ids are bad"] if placeholders else []
    return lines


def draft_label_columns(table: pa.Table, profiles: list[ColumnProfile], label_id: str, source_name: str) -> list[str]:
    """Draft columns for answers, and name dates from which labels are available.

    Titles come first, then columns that requests filter by.
    """
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
    lines = [f"display = {to_toml(displayed)}  # in answers, and what requests filter by"] if displayed else []
    for profile in profiles:
        if not is_availability_start(profile.name):
            continue
        if profile.content == "date" or (
            (times := read_times(table[profile.name])) is not None and times.unit is not None
        ):
            lines.append(f"# By its name, {profile.name} in {source_name} is since when a label is there.")
    return lines


def is_availability_start(name: str) -> bool:
    """Return whether a date column, by its name, says since when a label is there."""
    words = " ".join(spelled(name))
    return bool(_SINCE.search(words)) and not _UNTIL.search(words)


def _draft_split(log: pa.Table, timestamp: str, held_out: float) -> list[str]:
    """Draft the split by time."""
    times = read_times(log[timestamp])
    if times is None:
        return [f"timestamp = {to_toml(timestamp)}"]  # reading will refuse these times with a full message
    times_N, good_N, unit = times
    first, last = (format_time(float(time), unit) for time in (times_N[good_N].min(), times_N[good_N].max()))
    bad = f", not in {int((~good_N).sum()):,} rows" if not good_N.all() else ""
    return [
        f"timestamp = {to_toml(timestamp)}  # {first} to {last}{bad}",
        "# The latest pairs are held out, as a model answers queries of days after its training.",
        f'split = {{ strategy = "temporal", valid = {held_out}, test = {held_out} }}',
    ]


def draft_prior(recipe: Recipe, dataset: Dataset) -> tuple[str, list[str]]:
    """Choose the kind of prior that predicts the latest training pairs best.

    Returns:
        The kind, and the lines of its section with the reason.
    """
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
        lines.append(f"since = {to_toml(recipe.prior.since)}  # by its name, since when a label is there")
    if kind == "forecast" and recipe.prior.features:
        lines.append(f"features = {to_toml(recipe.prior.features)}")
    return kind, [*lines, ""]


def draft_cooccurrence(recipe: Recipe, dataset: Dataset) -> list[str]:
    """Draft the term of co-occurrence, with the share of pairs that it finds alone.

    The pairs are those before test. Empty if no query has a new label to find.
    """
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


def name_features(
    profiles: list[ColumnProfile], id_name: str, used_names: set[str]
) -> tuple[list[tuple[str, ColumnProfile]], list[str]]:
    """Name the columns of a feature table for a tower, without names in `used_names`.

    Returns:
        Names with their columns, and a reason for each column that is left out.
    """
    features: list[tuple[str, ColumnProfile]] = []
    left_out = []
    for column in profiles:
        if column.name == id_name:
            continue
        if column.content not in KINDS:
            left_out.append(f"{column.name}: {column.content}")
            continue
        plain = "_".join(re.findall(r"[A-Za-z0-9]+", column.name))
        plain = plain if is_feature_name(plain) else f"feature_{plain}".rstrip("_")
        name = next(it for it in chain([plain], (f"{plain}_{i}" for i in count(2))) if it not in used_names)
        used_names.add(name)
        features.append((name, column))
    return features, left_out


def draft_tower(
    features: list[tuple[str, ColumnProfile]], left_out: list[str], lines: list[str], *, ranges: bool = False
) -> str:
    """Draft a tower and the features of its table.

    Args:
        lines: lines of the first features, to which the others are appended.
        ranges: embed numbers by their range.
    """
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
            keys["dim"] = WIDTH if equal or many or column.content in ("words", "joined", "bag") else 16
        if many:
            keys["min_count"] = 2
        values = f"{column.distinct:,} values" if column.distinct else column.content
        lines.append(f"{to_toml(keys)},  # {values}{f', {column.nulls:,} missing' if column.nulls else ''}")
    why = "features of one width add up" if equal else "side by side, then one linear layer: no id is forgotten"
    combine = [f'combine = "{"sum" if equal else "concat"}"  # {why}', "features = ["]
    reasons = [f"# Left out: {reason}." for reason in left_out]
    return join_lines([*reasons, *combine, *(f"    {line}" for line in lines), "]"])


def is_feature_name(name: str) -> bool:
    """Return whether a recipe may name a feature so."""
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*", name) is not None


def join_lines(lines: Sequence[str]) -> str:
    """Join lines, without control characters, which names in comments may contain."""
    return "\n".join(re.sub(r"[\x00-\x1f\x7f]", " ", line) for line in lines)


def to_toml(value: Any) -> str:
    """Format one value as TOML in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{tomlkit.key(key).as_string()} = {to_toml(item)}' for key, item in value.items())} }}"
    return str(tomlkit.item(value).as_string())
