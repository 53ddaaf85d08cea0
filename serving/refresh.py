"""Refreshes the forecast of popularity that is served, from the service's own events, in a process of its own.

The process builds a release beside CURRENT and publishes it; workers follow CURRENT as ever. What fails is logged and
tried again an interval later, and the release before stays in service.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa

from longtail.bundle import BundleError
from longtail.bundle.forecast import ForecastSettings
from longtail.index import LongtailIndexError
from longtail.index.construct.pairs import known_pairs
from longtail.index.release.building import refresh_forecast
from longtail.index.release.releases import Releases
from longtail.serving import logs
from longtail.serving.errors import ServingError
from longtail.serving.events.reader import ONCE, events_of
from longtail.serving.settings import Settings

logger = logging.getLogger(__name__)

_OF_PRIOR = ".prior-"
"""In the names of releases that are made here, before the time."""
_KEEP = 2
"""Of these, the newest that stay; the one before is what `rollback` would go to."""
_UNDER_WAY_SECONDS = 5
"""After which every event that was taken is on disk."""
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
    """Refresh the forecast every `settings.refresh_prior` for as long as this is open."""
    if settings.refresh_prior is None:
        yield
        return
    process = get_context("spawn").Process(
        target=_refresh_for_ever, args=(settings, log_level, os.getpid()), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def refresh(settings: Settings) -> str:
    """Publish a release whose forecast knows the events up to now; return its name.

    Raises:
        LongtailIndexError: there is no release with a forecast, or no later event; or another one was published.
        ServingError, BundleError, OSError: events cannot be read, or a release cannot be written.
    """
    releases, until = Releases(settings.releases), time.time() - _UNDER_WAY_SECONDS
    current = releases.current()
    if current is None:
        raise LongtailIndexError(f"{releases}: expected a published release, found none")
    bundle = releases.open(current).bundle
    if bundle.forecast is None:
        raise LongtailIndexError(f"{current}: expected a release whose bundle has a forecast, found none")
    pairs = known_pairs(_chosen(settings, bundle.forecast.settings, until), bundle)
    if not (pairs.times > bundle.forecast.settings.until).any():
        raise LongtailIndexError(f"{current}: expected events since its forecast, found none")
    base = current.split(_OF_PRIOR)[0]
    name = f"{base}{_OF_PRIOR}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    refresh_forecast(settings.releases, pairs, source=current, name=name, until=until)
    try:
        releases.publish(name, instead_of=current)
    finally:  # also of those that could not be published
        releases.prune(_KEEP, among=[each for each in releases.names() if _OF_PRIOR in each])
    return name


def _chosen(settings: Settings, forecast: ForecastSettings, until: float) -> pa.Table:
    """Read what was chosen since the forecast: a number for each query, label ids, and seconds since 1970."""
    since = forecast.until - forecast.once_in
    with events_of(Path(settings.events or settings.state_directory / "events")) as connection:
        given = {"since": since, "until": until, "query_id": forecast.query_id, "ignored": forecast.ignored}
        return connection.execute(_CHOSEN, given).to_arrow_table()


def _refresh_for_ever(settings: Settings, log_level: str, parent: int) -> None:
    """Refresh after every interval until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    logs.configure(log_level)
    assert settings.refresh_prior is not None
    while os.getppid() == parent:
        due = time.monotonic() + settings.refresh_prior
        while (left := due - time.monotonic()) > 0 and os.getppid() == parent:
            time.sleep(min(left, 1.0))
        try:
            logger.info("forecast of popularity refreshed: %s", refresh(settings))
        except (LongtailIndexError, BundleError, ServingError, OSError) as error:
            logger.warning("forecast of popularity not refreshed, and the one before serves on: %s", error)
        except Exception:
            logger.exception("forecast of popularity not refreshed, and the one before serves on")
