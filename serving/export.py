"""Export feedback as training data.

The columns, in order:

- the query id, if the release knows its name, and every query feature of the release; ids are text, like in the
  bundle;
- features that the release does not read, as text;
- the label id;
- the columns of `_COLUMNS`. `position` starts at 0 and is null if the label was not in the answer; `impressions` are
  the labels of the answer, null unless the answer was recorded.

A feature with the name of a later column becomes `feature_NAME`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq

from longtail.bundle import Feature, Manifest
from longtail.bundle.errors import describe
from longtail.bundle.integrity import read_manifest
from longtail.bundle.objects import is_url
from longtail.index import open_releases
from longtail.index.release.release import BUNDLE
from longtail.serving.errors import ServingError
from longtail.serving.events.folder import kept_since
from longtail.serving.events.reader import damaged_files, open_events

_COLUMNS = {
    "answer": "answer",
    "idempotency_key": "idempotency_key",
    "event": "event",
    "weight": "weight",
    "propensity": "propensity::DOUBLE",
    "debiased_weight": "weight / propensity",
    "position": "position",
    "bias_removal": "bias_removal",
    "popularity": "popularity",
    "cooccurrence": "cooccurrence",
    "release": "release",
    "source": "CASE kind WHEN 'choice' THEN 'answer' ELSE kind END",
    "time": "time",
    "arm": "arm",
    "run": "run",
    "unit": "unit",
    "impressions": "impressions",
}
"""SQL expression of each column."""
_IN_WINDOW = "time >= to_timestamp($since)"
_CHOSEN = f"CREATE TEMP TABLE chosen AS SELECT * FROM choices WHERE {_IN_WINDOW}"
_REPEATS = f"""
SELECT coalesce(sum(len(labels)), 0)::BIGINT - (SELECT count(*) FROM chosen) FROM events
WHERE kind IN ('choice', 'organic') AND {_IN_WINDOW} AND time < to_timestamp($until)
"""
_LATER = """
SELECT count(*), count(*) FILTER (time > to_timestamp($now)) FROM events
WHERE kind IN ('choice', 'organic') AND time >= to_timestamp($until)
"""
_UNDER_WAY_MINUTES = 1
"""Age after which every event is certainly on disk."""
_UPLOADED_MINUTES = 30
"""Age after which events are in a URL: 10 minutes in a segment, 10 until the next upload, and 10 in reserve."""
_MOST_OTHERS = 100
"""Most columns of features that the release does not read."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_SECONDS = {"d": 86_400, "h": 3600, "m": 60}


class FeedbackExportError(ServingError):
    """Feedback cannot be exported."""


def minutes_under_way(events: str | None) -> int:
    """Return the age in minutes after which events are stored."""
    return _UPLOADED_MINUTES if events is not None and is_url(events) else _UNDER_WAY_MINUTES


def read_window(since: str | None, until: str | None, now: float, events: str | None = None) -> tuple[float, float]:
    """Parse a time window into seconds since 1970.

    Args:
        since, until: ISO 8601, UTC by default, or an age such as `7d`. None: from the beginning, and until
            `minutes_under_way` ago, because later events may not be in their place yet.
        events: folder or URL of the events; None for the folder of a service.

    Raises:
        FeedbackExportError: a time has neither form.
    """
    under_way = minutes_under_way(events)
    begin, end = (
        default if text is None else _seconds(option, text, now)
        for option, text, default in (("--since", since, 0.0), ("--until", until, now - 60 * under_way))
    )
    if begin >= end:
        raise FeedbackExportError(
            f"--since: expected a time before --until, received {since!r} and {until or f'{under_way}m'!r}"
        )
    return begin, end


def export(
    releases: str | Path,
    events: Path,
    out: Path,
    *,
    window: tuple[float, float],
    everything: bool = False,
) -> list[str]:
    """Write feedback as a Parquet file, complete or absent.

    Args:
        releases: directory or URL; every query feature of CURRENT becomes a column, even if no client sent it.
        out: path of the file; an existing file is replaced.
        window: start (included) and end (excluded) of the events' times, in seconds since 1970.
        everything: also export choices without features or query id, which training refuses.

    Returns:
        Lines for people that describe the export.

    Raises:
        FeedbackExportError: there is no release.
        StateError: the events cannot be read.
        OSError: the file cannot be written.
    """
    manifest = read_published(releases)
    features = {feature.name: feature for feature in manifest.query_features}
    label_id, query_id = _id_columns(manifest)
    since, until = window
    working = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open_events(events, since, until) as connection:
            connection.execute(_CHOSEN, {"since": since})
            repeats = connection.execute(_REPEATS, {"since": since, "until": until}).fetchone() or (0,)
            later = connection.execute(_LATER, {"until": until, "now": time.time()}).fetchone() or (0, 0)
            is_kept = "TRUE" if everything else "(features IS NOT NULL)"
            # Training refuses a whole log for one row without an id.
            has_ids = "label <> ''"
            if query_id is not None and not everything:
                has_ids += f" AND coalesce({id_sql(_member(query_id))}, '') <> ''"
            left_out = connection.execute(
                f"SELECT count(*) FILTER (NOT {is_kept}), count(*) FILTER ({is_kept} AND NOT ({has_ids})) FROM chosen"
            ).fetchone() or (0, 0)
            sent = connection.execute(
                "SELECT name FROM (SELECT unnest(json_keys(features)) AS name FROM chosen) "
                "GROUP BY name ORDER BY count(*) DESC, name"
            ).fetchall()
            values, no_columns = _columns(features, [name for (name,) in sent], label_id, query_id)
            columns = [f'{value} AS "{column}"' for column, value in values.items()]
            columns += [f'label AS "{label_id}"', *(f"{value} AS {name}" for name, value in _COLUMNS.items())]
            target = str(working).replace("'", "''")
            connection.execute(
                f"COPY (SELECT {', '.join(columns)} FROM chosen WHERE ({is_kept}) AND {has_ids} "
                # A total order, so that equal events give an equal file.
                f"ORDER BY time, answer, label, event) TO '{target}' (FORMAT parquet, COMPRESSION zstd)"
            )
        rows = pq.read_metadata(working).num_rows
        working.replace(out)
    finally:
        working.unlink(missing_ok=True)
    lines = [f"{rows:,} labels chosen"]
    if left_out[0]:
        why = "whose query's features are not known: send `features` with feedback (--all takes these, too)"
        lines.append(f"left out: {left_out[0]:,} labels {why}")
    if left_out[1]:
        what = (
            "label is empty" if query_id is None or everything else f"label is empty, or whose query has no {query_id}"
        )
        lines.append(f"left out: {left_out[1]:,} labels whose {what}: training refuses rows without an id")
    if repeats[0]:
        lines.append(
            f"left out: {repeats[0]:,} labels sent again: by an idempotency key, or by answer, label and event"
        )
    if later[0]:
        lines.append(
            f"left out: {later[0]:,} events of {_iso(until)} and later, for the next export (--until 0m takes all)"
        )
    if later[1]:
        why = "ahead of this machine's clock: it has been set back, or that of a service is ahead"
        lines.append(f"of these {later[1]:,} are dated {why}; --until with a later time takes them")
    if (complete_since := kept_since(events)) > since:
        lines.append(
            f"events from before {_iso(complete_since)} are not kept (LONGTAIL_EVENTS_DAYS, LONGTAIL_EVENTS_BYTES)"
        )
    if no_columns:
        names = ", ".join(map(describe, no_columns[:10])) + (", …" if len(no_columns) > 10 else "")
        lines.append(f"left out: {len(no_columns)} features that cannot be columns of their own: {names}")
    lines += [f"left out: lines of {name} that are no events" for name in damaged_files(events)]
    return [*lines, f"written: {out}"]


def _columns(
    features: Mapping[str, Feature], sent: Sequence[str], label_id: str, query_id: str | None
) -> tuple[dict[str, str], list[str]]:
    """Return each feature's column, and features that cannot be columns.

    Args:
        sent: names of features that clients sent, the most frequent first.
    """
    # A feature must not replace a column that training reads.
    reserved = {name.casefold() for name in (*_COLUMNS, label_id)}
    values, used, left_out = dict[str, str](), set(reserved), list[str]()
    if query_id is not None:
        values[query_id] = id_sql(_member(query_id))
        used.add(query_id.casefold())
    others = [name for name in sent if name not in features]
    for name in [*features, *others]:
        if name == query_id:
            continue
        column = f"feature_{name}" if name.casefold() in reserved else name
        # SQL does not distinguish names that differ only in case.
        fits = _NAME.fullmatch(name) is not None and len(values) < len(features) + _MOST_OTHERS
        if not fits or column.casefold() in used:
            left_out.append(name)
            continue
        used.add(column.casefold())
        values[column] = feature_sql(features[name]) if name in features else f"features ->> '$.{name}'"
    return values, left_out


def _id_columns(manifest: Manifest) -> tuple[str, str | None]:
    """Return training's names of the columns of label ids and, where known, query ids.

    A name that another column has, or that cannot be a column, is not taken.
    """
    columns = manifest.training_data
    if manifest.cooccurrence is not None:  # vectors of other libraries have no recipe
        columns = manifest.cooccurrence.log.model_dump() | columns
    label_id, query_id = str(columns.get("label_id", "label_id")), str(columns.get("query_id", ""))
    if label_id.casefold() in _COLUMNS or '"' in label_id:
        label_id = "label_id"
    is_free = query_id.casefold() not in (*_COLUMNS, label_id.casefold())
    return label_id, query_id if is_free and _NAME.fullmatch(query_id) else None


def read_published(releases: str | Path) -> Manifest:
    """Read the manifest of the published release's bundle."""
    directory = open_releases(releases)
    if (current := directory.current()) is None:
        raise FeedbackExportError(f"{releases}: expected a published release, whose features are columns, found none")
    with directory.manifests(current) as path:
        return read_manifest(path / BUNDLE)


def feature_sql(feature: Feature) -> str:
    """Return the SQL of a feature in the type that training reads."""
    value, text = _member(feature.name), f"features ->> '$.{feature.name}'"
    if feature.kind == "number":
        return f"TRY_CAST({value} AS DOUBLE)"
    if feature.kind == "vector":
        return f"TRY_CAST({value} AS DOUBLE[])"
    if feature.kind in ("history", "audience", "bag"):
        # In an object the keys are ids, and the values their weights.
        joined = "NULL"
        if feature.separator is not None:
            separator = feature.separator.replace("'", "''")
            joined = f"[trim(part) FOR part IN string_split({text}, '{separator}') IF trim(part) <> '']"
        return (
            f"CASE json_type({value}) WHEN 'ARRAY' THEN {_ids(f'TRY_CAST({value} AS JSON[])')} "
            f"WHEN 'OBJECT' THEN json_keys({value}) "
            f"WHEN 'VARCHAR' THEN coalesce(TRY_CAST({text} AS VARCHAR[]), {joined}) END"
        )
    return id_sql(value) if feature.kind == "id" else text


def id_sql(value: str) -> str:
    """Return the SQL that converts JSON to an id."""
    text = f"{value} ->> '$'"
    return rf"CASE json_type({value}) WHEN 'DOUBLE' THEN regexp_replace({text}, '\.0+$', '') ELSE {text} END"


def _member(name: str) -> str:
    return f"json_extract(features, '$.{name}')"


def _ids(values: str) -> str:
    return f"[{id_sql('id')} FOR id IN {values}]"


def _seconds(option: str, text: str, now: float) -> float:
    if age := re.fullmatch(r"(\d+)([dhm])", text):
        return now - int(age[1]) * _SECONDS[age[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise FeedbackExportError(
            f"{option}: expected ISO 8601, or an age such as 7d, 12h or 30m, received {describe(text)}"
        ) from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
