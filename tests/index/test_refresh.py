"""A release is refreshed by later pairs: co-occurrence, remembered queries, added labels; and a rollback holds."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, Hide, LabelChanges, Patch, Upsert, Vocabulary
from longtail.bundle.forecast import CalendarSettings, Forecast, ForecastSettings
from longtail.bundle.histories import LogPairs, remember
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.neighbours import cooccurrences
from longtail.bundle.weighed_pairs import WeighedPairs
from longtail.index import PriorsError, RefreshOptions, Releases, build, open_releases, refresh
from longtail.index.errors import NothingNewError
from longtail.state import LabelStore
from tests.bundles import label_features, make_bundle
from tests.end_to_end.killing import start
from tests.index.test_cli import run

LABELS, USERS, NEW = 60, 20, "brand-new"
BEGIN = datetime(2026, 1, 2, tzinfo=UTC).timestamp()
RNG = np.random.default_rng(3)
FIRST = RNG.integers(0, USERS, 300), RNG.integers(0, LABELS, 300)
"""Users and labels of the log of W, a pair a second."""
SETTINGS = CooccurrenceSettings(
    default=0.5, maximum=2, kind="cosine", last=10, decay=0.9, neighbours=LABELS - 1, scale=3, until=BEGIN + 299
)


def write_log(folder: Path, users: list[str], labels: list[str], begin: float) -> Path:
    times = pa.array([int(1e6 * (begin + second)) for second in range(len(users))], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"query_id": users, "label_id": labels, "time": times}), folder / "log.parquet")
    return folder / "log.parquet"


def add_cooccurrence(bundle: Bundle) -> Bundle:
    order = np.argsort(FIRST[0], kind="stable")
    pairs = LogPairs(FIRST[0][order], FIRST[1][order])
    term = cooccurrences(pairs, LABELS, [SETTINGS])[0].scaled(3)
    term = replace(term, settings=SETTINGS)
    users = Vocabulary(pa.array([f"u{user}" for user in range(USERS)]))
    remembered = remember(pairs, users, np.arange(1, USERS + 1, dtype=np.int32), 50)
    manifest = bundle.manifest.model_copy(update={"cooccurrence": SETTINGS})
    return replace(bundle, manifest=manifest, cooccurrence=term, remembered=remembered)


@pytest.fixture
def releases(tmp_path: Path) -> Releases:
    """Release `first`, published, of a bundle with co-occurrence."""
    add_cooccurrence(make_bundle(labels=LABELS, users=USERS, label_tower=True)).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="first")
    releases = open_releases(tmp_path / "releases")
    releases.publish("first")
    return releases


def weight(bundle: Bundle, label: str, neighbour: str) -> float:
    assert bundle.cooccurrence is not None
    rows = bundle.labels.rows_by_id
    return float(bundle.cooccurrence.matrix()[rows[label], rows[neighbour]])


def made_name(releases: Releases) -> str:
    """Name of the release whose name begins with its time."""
    (name,) = [name for name in releases.names() if name[0].isdigit()]
    return name


def test_a_command_adds_later_pairs_and_links_the_index(
    releases: Releases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = [f"item-{row}" for row in (1, 2, 3)]
    log = write_log(tmp_path, ["u1", "fresh", "fresh"], later, BEGIN + 1000)
    assert run("refresh", releases.root, log, "--publish") == 0

    name = str(releases.current())
    assert f"{name}: flat over 60 labels" in capsys.readouterr().out
    first, second = releases.verify("first"), releases.verify(name)
    assert name.endswith("-synthetic"), "the bundle's name"
    for file in first.manifest.files:
        assert (first.path / file).samefile(second.path / file)
    assert second.manifest.recall == first.manifest.recall
    term, remembered = second.bundle.cooccurrence, second.bundle.remembered
    assert term is not None
    assert remembered is not None
    assert first.bundle.remembered is not None
    assert term.settings == SETTINGS.model_copy(update={"until": BEGIN + 1002})
    rows = second.bundle.labels.rows_by_id
    assert remembered.history("fresh").tolist() == [rows["item-2"], rows["item-3"]]
    assert remembered.history("u1").tolist() == [*first.bundle.remembered.history("u1").tolist(), rows["item-1"]]
    assert remembered.history("u2").tolist() == first.bundle.remembered.history("u2").tolist()

    # The same pairs again are known, and a quiet night has none: neither is an error of a job.
    assert run("refresh", releases.root, log) == 0
    nothing = f"nothing to do: {name}: expected pairs later than those it knows, up to 2026-01-02 00:16, found none"
    assert nothing in capsys.readouterr().err
    (tmp_path / "quiet.csv").write_text("")
    assert run("refresh", releases.root, tmp_path / "quiet.csv") == 0
    assert "nothing to do: " in capsys.readouterr().err
    assert {*releases.names()} == {"first", name}


def test_a_whole_log_equals_later_pairs(releases: Releases, tmp_path: Path) -> None:
    users = [f"u{user}" for user in FIRST[0]] + ["u1", "u2", "new"] * 10
    labels = [f"item-{row}" for row in FIRST[1]] + [f"item-{row}" for row in range(30)]
    refresh(releases.root, write_log(tmp_path, users, labels, BEGIN), name="later")
    assert run("refresh", releases.root, tmp_path / "log.parquet", "--whole") == 0

    later, from_whole_log = (releases.open(name).bundle for name in ("later", made_name(releases)))
    assert later.cooccurrence is not None
    assert from_whole_log.cooccurrence is not None
    np.testing.assert_allclose(
        later.cooccurrence.matrix().todense(), from_whole_log.cooccurrence.matrix().todense(), rtol=1e-4, atol=1e-6
    )
    assert later.cooccurrence.settings == from_whole_log.cooccurrence.settings
    assert later.remembered is not None
    assert from_whole_log.remembered is not None
    for name in ("u1", "u2", "u3", "new"):
        assert later.remembered.history(name).tolist() == from_whole_log.remembered.history(name).tolist()


def test_labels_added_while_serving_become_rows_with_neighbours(
    releases: Releases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = datetime(2026, 1, 3, tzinfo=UTC)
    records = [
        Upsert(id=NEW, at=at, features=label_features(3), display={"title": "Brand new"}),
        Patch(id="item-4", at=at, display={"title": "Renamed"}),
        Hide(id="item-5", at=at),
    ]
    LabelStore(tmp_path).append(records)
    users = [user for user in ("u1", "u2", "a", "b") for _ in range(2)]
    log = write_log(tmp_path, users, [NEW, "item-7"] * 4, BEGIN + 1000)

    refresh(releases.root, log, name="without")
    assert run("refresh", releases.root, log, "--labels", tmp_path) == 0
    assert "labels: 1 that were added while serving are rows" in capsys.readouterr().out
    name = made_name(releases)
    without, bundle = releases.open("without").bundle, releases.open(name).bundle
    assert len(without.labels.ids) == LABELS
    assert len(bundle.labels.ids) == LABELS + 1
    assert weight(bundle, "item-7", NEW) > 0
    assert weight(bundle, NEW, "item-7") > 0
    rows = bundle.labels.rows_by_id
    assert bundle.labels.display["title"][rows["item-4"]].as_py() == "Renamed"
    assert "item-5" in rows  # the service hides it, and may restore it
    assert releases.open(name).searcher.labels == LABELS + 1
    assert bundle.manifest.data_until == at
    refresh(releases.root, log, RefreshOptions(changes=LabelChanges().apply(records)), name="again")
    assert len(releases.open("again").bundle.labels.ids) == LABELS + 1


def test_pairs_of_labels_that_the_release_lacks_are_counted(releases: Releases, tmp_path: Path) -> None:
    log, progress_lines = write_log(tmp_path, ["u1", "u1"], [NEW, "item-7"], BEGIN + 1000), list[str]()
    refresh(releases.root, log, name="second", progress=progress_lines.append)
    assert "pairs: 1 of 2 left out, of labels that the release lacks" in progress_lines


def test_types_of_events_weigh_as_in_training(releases: Releases, tmp_path: Path) -> None:
    types = {"event": "kind", "weights": {"buy": 4.0, "click": 1.0, "view": 0.0}, "weight": "given"}
    of = {"log": SETTINGS.log.model_copy(update=types)}
    bundle = releases.open("first").bundle
    assert bundle.cooccurrence is not None
    settings = SETTINGS.model_copy(update=of)
    manifest = bundle.manifest.model_copy(update={"cooccurrence": settings})
    changed = replace(bundle, manifest=manifest, cooccurrence=replace(bundle.cooccurrence, settings=settings))
    build(changed.write(tmp_path / "weighed"), releases.root, name="weighed")
    log = pq.read_table(write_log(tmp_path, ["a"] * 5, [f"item-{row}" for row in range(1, 6)], BEGIN + 1000))
    log = log.append_column("kind", pa.array(["buy", "click", "view", None, "search"]))
    log = log.append_column("given", pa.array([1.0, 0.5, 1.0, 1.0, 1.0]))
    pq.write_table(log, tmp_path / "log.parquet")
    progress_lines = list[str]()
    refresh(releases.root, tmp_path / "log.parquet", source="weighed", name="second", progress=progress_lines.append)
    assert 'pairs: 3 of 5 left out, of weight 0, or of types without a weight: "search", null' in progress_lines

    term, rows = releases.open("second").bundle.cooccurrence, bundle.labels.rows_by_id
    assert term is not None
    added = term.degrees_L - bundle.cooccurrence.degrees_L
    assert [added[rows[f"item-{row}"]] for row in range(1, 6)] == [4, 0.5, 0, 0, 0]


def test_a_calendar_changes_shares_without_events(tmp_path: Path) -> None:
    """Even labels sell at noon and odd ones at midnight; no event comes for twelve hours."""
    day, noon = 86_400.0, BEGIN + 43_200
    labels, days = np.tile(np.arange(LABELS), 28), np.repeat(np.arange(28), LABELS)
    times = BEGIN - 28 * day + days * day + np.where(labels % 2 == 0, 43_200, 60)
    calendar = CalendarSettings(feature="kind", values=["even", "odd"], windows=["hour"], shrinkage=1e-6)
    settings = ForecastSettings(
        kind="decayed", half_lives=[28 * day, 8 * day], base=0, smoothing=1e-9, horizon=7 * day, pairs=LABELS,
        until=BEGIN - 28 * day, attributes=["kind"], calendar=calendar, query_id="query_id", label_id="label_id",
        timestamp="time",
    )  # fmt: skip
    about = pa.table({"kind": pa.array(["even", "odd"] * (LABELS // 2)).dictionary_encode()})
    empty = Forecast(settings, np.zeros((LABELS, 2)), np.full(LABELS, np.inf), about, seasons=np.zeros((3, 168)))
    forecast = empty.counted(WeighedPairs.weigh(np.arange(len(labels)), labels, times), BEGIN)
    bundle = add_cooccurrence(make_bundle(labels=LABELS, users=USERS, popularity=True))
    log_popularity = forecast.log_popularity().astype(np.float32)
    replace(bundle, forecast=forecast, labels=replace(bundle.labels, log_popularity=log_popularity)).write(
        tmp_path / "bundle"
    )
    build(tmp_path / "bundle", tmp_path / "releases", name="first")
    releases = open_releases(tmp_path / "releases")
    releases.publish("first")
    columns = {"query": pa.int64(), "label": pa.string(), "time": pa.float64(), "id": pa.string(), "event": pa.string()}
    nothing = pa.table({name: pa.array([], type_) for name, type_ in (columns | {"weight": pa.float64()}).items()})

    at_noon = refresh(releases.root, lambda *_: nothing, RefreshOptions(until=noon, ahead=3600.0))
    shares = np.exp(releases.open(at_noon.name).bundle.labels.log_popularity)
    assert shares[::2].sum() > 0.99 * shares.sum()
    with pytest.raises(NothingNewError, match="found none"):
        refresh(releases.root, lambda *_: nothing, RefreshOptions(ahead=3600.0))


def test_a_rollback_holds_until_somebody_publishes(
    releases: Releases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_log(tmp_path, ["u1"], ["item-1"], BEGIN + 1000)
    assert run("refresh", releases.root, log, "--publish") == 0
    second = str(releases.current())
    assert run("rollback", releases.root) == 0
    assert releases.pointers().is_held
    assert run("refresh", releases.root, log, "--publish") == 2
    assert "found one after a rollback, which holds until `longtail-index publish`" in capsys.readouterr().err
    assert releases.names() == [second, "first"]

    assert run("publish", releases.root / second) == 0
    assert not releases.pointers().is_held


def test_a_refresh_needs_a_forecast_or_cooccurrence(tmp_path: Path) -> None:
    make_bundle().write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="plain")
    with pytest.raises(PriorsError, match="expected a release whose bundle has a forecast or co-occurrence"):
        refresh(tmp_path / "releases", write_log(tmp_path, ["u1"], ["item-1"], BEGIN), source="plain")


def refresh_killed_at(opening: int, releases: Path, log: Path) -> None:
    """Refresh, and SIGKILL this process when it opens its n-th file below a temporary folder."""
    openings = count()

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and ".tmp/" in str(arguments[0]) and next(openings) == opening:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    refresh(releases, log)


def test_killed_refreshes_leave_complete_releases_only(releases: Releases, tmp_path: Path) -> None:
    log = write_log(tmp_path, ["u1"] * 50, [f"item-{row}" for row in range(50)], BEGIN + 1000)
    for opening in (12, 6, 3, 0):
        process = start(refresh_killed_at, opening, releases.root, log)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    for name in releases.names():
        releases.verify(name)
    leftovers = [*releases.root.glob(".*.tmp")]
    refresh(releases.root, log, name="last")
    assert leftovers
    assert not [*releases.root.glob(".*.tmp")]
    assert releases.current() == "first"
    assert os.path.samefile(releases.root / "first/index/index.faiss", releases.root / "last/index/index.faiss")
