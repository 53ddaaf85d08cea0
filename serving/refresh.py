"""Refresh the served forecast of popularity from the service's own events.

A separate process builds a release from CURRENT and publishes it; workers follow CURRENT. A failure is logged and
retried an interval later; the present release stays in service.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa

from longtail.bundle import Bundle, BundleError
from longtail.bundle.forecast import Forecast, ForecastSettings
from longtail.index import LongtailIndexError
from longtail.index.construct.pairs import NewPairs, known_pairs
from longtail.index.release.building import refresh_forecast
from longtail.index.release.releases import Releases
from longtail.serving import logs
from longtail.serving.errors import ServingError
from longtail.serving.events.reader import ONCE, events_of
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_OF_PRIOR = ".prior-"
"""Part of the names of refreshed releases, before the time."""
_KEEP = 2
"""Refreshed releases that are kept; the second newest is the target of `rollback`."""
_NOT_REFRESHED = "forecast of popularity not refreshed, and the one before serves on"
_UNDER_WAY_SECONDS = 5
"""Age after which every accepted event is on disk."""
_CHOSEN = f"""
WITH once AS ({ONCE})
SELECT
    (hash(coalesce(json_extract_string(features, '$."' || $query_id || '"'), features, answer)) >> 1)::BIGINT query,
    unnest(labels) AS label, epoch_us(time) / 1e6 AS time
FROM once
WHERE kind IN ('choice', 'organic') AND coalesce(features, answer) IS NOT NULL
    AND NOT list_contains($ignored, coalesce(event, ''))
"""


@contextmanager
def refreshing(settings: Settings, log_level: str) -> Iterator[None]:
    """Refresh the forecast every `settings.refresh_prior` inside the block."""
    if settings.refresh_prior is None:
        yield
        return
    stopped = Event()
    follower = Thread(target=_refresh_until, args=(stopped, settings, log_level), daemon=True)
    follower.start()
    try:
        yield
    finally:
        stopped.set()
        follower.join()


def refresh(settings: Settings) -> str:
    """Publish a release whose forecast includes the events up to now; returns its name.

    Raises:
        LongtailIndexError: there is no release with a forecast, or no later event; or another release was published.
        ServingError, BundleError, OSError: events cannot be read, or a release cannot be written.
    """
    releases, until = Releases(settings.releases), time.time() - _UNDER_WAY_SECONDS
    current = releases.current()
    if current is None:
        raise LongtailIndexError(f"{releases}: expected a published release, found none")
    name = f"{current.split(_OF_PRIOR)[0]}{_OF_PRIOR}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"

    def chosen(bundle: Bundle, forecast: Forecast) -> NewPairs:
        return known_pairs(_chosen(settings, forecast.settings, until), bundle)

    refresh_forecast(settings.releases, chosen, source=current, name=name, until=until)
    try:
        releases.publish(name, instead_of=current)
    finally:  # releases that could not be published are pruned too
        releases.prune(_KEEP, among=[each for each in releases.names() if _OF_PRIOR in each])
    return name


def _chosen(settings: Settings, forecast: ForecastSettings, until: float) -> pa.Table:
    """Read the choices since the forecast: a number per query, label ids, and seconds since 1970."""
    since = forecast.until - forecast.once_in
    with events_of(Path(settings.events or settings.state_directory / "events")) as connection:
        given = {"since": since, "until": until, "query_id": forecast.query_id, "ignored": forecast.ignored}
        return connection.sql(_CHOSEN, params=given).to_arrow_table()


def _refresh_until(stopped: Event, settings: Settings, log_level: str) -> None:
    """Refresh after every interval, each time in a new process, until an event is set."""
    while not stopped.wait(settings.refresh_prior):
        process = get_context("spawn").Process(target=_refresh_once, args=(settings, log_level), daemon=True)
        try:
            process.start()
        except OSError as error:  # not enough memory, or too many processes
            logger.warning("%s: %s", _NOT_REFRESHED, error)
            continue
        while process.is_alive() and not stopped.wait(0.1):
            pass
        if process.is_alive():
            process.terminate()
        process.join()
        if process.exitcode and not stopped.is_set():
            logger.warning("%s: its process ended with %s", _NOT_REFRESHED, process.exitcode)


def _refresh_once(settings: Settings, log_level: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    logs.configure(log_level)
    try:
        logger.info("forecast of popularity refreshed: %s", refresh(settings))
    except (LongtailIndexError, BundleError, ServingError, OSError) as error:
        logger.warning("%s: %s", _NOT_REFRESHED, error)
    except Exception:
        logger.exception(_NOT_REFRESHED)
