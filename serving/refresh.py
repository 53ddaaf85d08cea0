"""Refresh served statistics from the service's own events.

A separate process builds a release from CURRENT and publishes it; workers follow CURRENT. A failure is logged and shown
in the verdict. The next attempt waits 2 intervals, then 4, then 8. The present release stays in service. After a
rollback nothing is refreshed until somebody publishes.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa

from longtail.bundle import BundleError
from longtail.bundle.manifest import LogColumns
from longtail.bundle.store import replace_file
from longtail.index import (
    LongtailIndexError,
    NothingNewError,
    RefreshOptions,
    open_releases,
    refresh as refresh_release,
)
from longtail.serving import logs
from longtail.serving.errors import ServingError
from longtail.serving.events.reader import open_events
from longtail.serving.export import feature_sql, id_sql, read_published
from longtail.serving.settings import Settings
from longtail.state import StoreError, read_label_changes

logger = logging.getLogger(__name__)

_REFRESHED = ".refreshed-"
"""Part of the names of refreshed releases, before the time."""
_KEEP = 2
"""Refreshed releases that are kept; the second newest is the target of `rollback`."""
_NOT_REFRESHED = "release not refreshed, and the one before serves on"
_ROLLED_BACK = (
    "Forecast, co-occurrence and exposure are not refreshed after a rollback, until `longtail-index publish`."
)
_MOST_INTERVALS = 8
"""Intervals between two attempts after which the wait, doubled by each failure in a row, grows no more."""
_LONGEST_FAILURE = 10_000
"""Most characters of a failure, which a pipe of 64 KiB holds: it is read when the process has ended."""
_UNDER_WAY_SECONDS = 5
"""Age after which every accepted event is on disk."""
_CHOSEN = """
WITH chosen AS (
    SELECT nullif({id}, '') AS id, features, answer, client, label, time, event, weight, propensity
    FROM choices WHERE coalesce(features, answer) IS NOT NULL
),
pairs AS (
    SELECT id, label, epoch_us(time) / 1e6 AS time, event, CASE WHEN $weighs THEN weight / propensity END AS weight,
        (hash(coalesce(id, concat_ws(' ', client, coalesce(features, answer), time::DATE))) >> 1)::BIGINT AS query
    FROM chosen WHERE id IS NOT NULL OR NOT coalesce({in_history}, false)
)
SELECT * FROM pairs WHERE time > $after OR query IN (SELECT query FROM pairs WHERE time > $after)
"""
"""Pairs of queries with their ids. A query without one is a client's features of a day, and its choice of a label that
its own history holds already is a repeated one: the history grows with every choice, and would pass for another query.
"""
_ANSWERED = """
SELECT label AS label_id, sum(weight) AS places FROM (
    SELECT unnest(labels) AS label,
        pow(2, (epoch_us(time) / 1e6 - $until) / $half_life) * CASE WHEN run IS NULL THEN 1 ELSE $share END AS weight
    FROM answers WHERE epoch_us(time) / 1e6 > $after AND epoch_us(time) / 1e6 <= $until
) GROUP BY label
"""
"""Places of labels in answers. Answers of an experiment are all recorded, so each weighs as much as the share of the
others that are."""


@contextmanager
def refreshing(settings: Settings) -> Iterator[None]:
    """Refresh the served release every `settings.refresh` inside the block."""
    _write_problem(settings, None)  # what a service said that was stopped, also where this one does not refresh
    if settings.refresh is None:
        yield
        return
    stopped = Event()
    follower = Thread(target=_refresh_until, args=(stopped, settings), daemon=True)
    follower.start()
    try:
        yield
    finally:
        stopped.set()
        follower.join()


def refresh(settings: Settings) -> str:
    """Publish a release with the latest events; returns its name.

    Raises:
        LongtailIndexError: there is no release with a forecast, co-occurrence or the prior `exposed`, or no later
            event; or a label has become popular all at once; or another release was published.
        StoreError, ServingError, BundleError, OSError: label changes or events cannot be read, or a release cannot be
            written.
    """
    # Times of events are microseconds, so the next refresh begins with the one after `until`.
    releases, until = open_releases(settings.releases), round(time.time() - _UNDER_WAY_SECONDS, 6)
    current = releases.current()
    if current is None:
        raise LongtailIndexError(f"{releases}: expected a published release, found none")
    name = f"{current.split(_REFRESHED)[0]}{_REFRESHED}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    changes = None
    with suppress(FileNotFoundError):  # no label was changed yet
        changes = read_label_changes(settings.state_location)

    folder = Path(settings.events or settings.state_directory / "events")

    def chosen(columns: LogColumns, after: float, begin: float) -> pa.Table:
        histories = [it for it in read_published(settings.releases).query_features if it.kind == "history"]
        in_history = " OR ".join(f"list_contains({feature_sql(feature)}, label)" for feature in histories) or "false"
        query_id = columns.query_id.replace('"', '\\"').replace("'", "''")
        query = _CHOSEN.format(id=id_sql(f"""json_extract(features, '$."{query_id}"')"""), in_history=in_history)
        end = round(until + 1e-6, 6)  # `until` itself counts
        with open_events(folder, begin, end) as connection:
            parameters = {"after": after, "weighs": columns.weight is not None}
            return connection.sql(query, params=parameters).to_arrow_table()

    def answered(after: float, half_life: float) -> pa.Table:
        if not settings.answer_share:
            logger.warning("LONGTAIL_ANSWER_SHARE is 0: the prior exposed knows the answers of experiments alone")
        share = settings.answer_share or 1.0
        parameters = {"after": after, "until": until, "half_life": half_life, "share": share}
        with open_events(folder) as connection:
            return connection.sql(_ANSWERED, params=parameters).to_arrow_table()

    options = RefreshOptions(
        answers=answered, changes=changes, until=until, ahead=settings.refresh, unattended=True
    )  # fmt: skip
    refresh_release(settings.releases, chosen, options, source=current, name=name, progress=logger.info)
    try:
        releases.publish(name, instead_of=current)
    finally:  # releases that could not be published are pruned too
        releases.prune(_KEEP, candidates=[other for other in releases.names() if _REFRESHED in other])
    return name


def _refresh_until(stopped: Event, settings: Settings) -> None:
    """Refresh after every interval, in a new process."""
    assert settings.refresh is not None
    failures, before, problem = 0, time.time(), None
    while not stopped.wait(settings.refresh * min(2**failures, _MOST_INTERVALS)):
        last_problem = problem
        if _is_held(settings):
            failures, problem = 0, _ROLLED_BACK
        elif (failure := _attempt(stopped, settings)) is None:
            failures, before, problem = 0, time.time(), None
        else:
            failures += 1
            logger.warning("%s: %s", _NOT_REFRESHED, failure)
            attempts = "1 attempt" if failures == 1 else f"{failures} attempts in a row"
            problem = (
                "Forecast, co-occurrence and exposure have not been refreshed since "
                f"{datetime.fromtimestamp(before, UTC):%F %R} UTC: {attempts} failed, most recently: {failure}."
            )
        if problem != last_problem:
            _write_problem(settings, problem)
            if problem == _ROLLED_BACK:
                logger.warning(_ROLLED_BACK)


def _attempt(stopped: Event, settings: Settings) -> str | None:
    spawn = get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    # In a process: what a refresh allocates, or a crash in it, ends with the process.
    process = spawn.Process(target=_refresh_once, args=(settings, sender), daemon=True)
    try:
        process.start()
    except OSError as error:  # not enough memory, or too many processes
        return str(error)
    finally:
        # The parent's copy would keep the pipe open after the process has ended.
        sender.close()
    # Looked at in turns, because a stop must not wait for the refresh.
    while process.is_alive() and not stopped.wait(0.1):
        pass
    if process.is_alive():
        process.terminate()
    process.join()
    with receiver, suppress(EOFError, OSError):  # OSError: the process ended in the middle of what it sent
        return receiver.recv() or None
    return None if stopped.is_set() else f"its process ended with {process.exitcode}"


def _write_problem(settings: Settings, problem: str | None) -> None:
    """Write why nothing is refreshed, for the verdict."""
    try:
        if problem is None:
            settings.refresh_problem.unlink(missing_ok=True)
        else:
            replace_file(settings.refresh_problem, problem.encode())
    except OSError as error:
        logger.warning("%s cannot be written: %s", settings.refresh_problem, error)


def _is_held(settings: Settings) -> bool:
    try:
        return open_releases(settings.releases).pointers().is_held
    except (LongtailIndexError, OSError):  # the refresh reports it
        return False


def _refresh_once(settings: Settings, sender: Connection) -> None:
    """Refresh, and send why that failed, or an empty string."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    logs.configure(settings.log_level)
    failure = ""
    try:
        logger.info("release refreshed: %s", refresh(settings))
    except NothingNewError as error:
        logger.info("release not refreshed: %s", error)
    except LongtailIndexError as error:
        failure = str(error)
    except Exception as error:  # its text may name a database or a folder, which clients need not know
        expected = isinstance(error, BundleError | ServingError | StoreError | OSError)
        logger.error("%s: %s", _NOT_REFRESHED, error, exc_info=not expected)
        failure = f"{type(error).__name__}, of which the service's own log says more"
    sender.send(failure[:_LONGEST_FAILURE])
