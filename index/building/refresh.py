"""Write a release from an earlier one, with new priors or later pairs; nothing is trained.

Legend: `L` labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtail.bundle import Bundle, LabelChanges, Priors, Vocabulary
from longtail.bundle.arrays import Float64
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.errors import describe
from longtail.bundle.forecast import Forecast
from longtail.bundle.histories import remember
from longtail.bundle.ids import find_rows
from longtail.bundle.manifest import LogColumns
from longtail.bundle.neighbours import cooccurrences, refresh_term
from longtail.bundle.store import remove_stale, working_directory
from longtail.index.building.merge import with_changes
from longtail.index.building.pairs import NewPairs, known_pairs, read_pairs, weighed
from longtail.index.building.priors import PriorTable
from longtail.index.building.queries import query_bundle
from longtail.index.building.writing import ReleaseWriter, free_name
from longtail.index.errors import NothingNewError, PriorsError, ReleaseNotFoundError
from longtail.index.manifests import ReleaseManifest
from longtail.index.recall import Progress
from longtail.index.release.release import BUNDLE, Release
from longtail.index.release.releases import Releases, open_releases
from longtail.tables import as_source

_MOST_NATS, _NOTABLE_SHARE = 4.0, 0.1
"""A label's share of choices that grows 55 times, to more than a tenth, is a flood rather than taste."""
_REPEATS = 7 * 86_400.0
"""Seconds before the last refresh in which earlier pairs are read; a service keeps events for 7 days by default."""

PairReader = Callable[[LogColumns, float, float], pa.Table]
"""Function of columns, a time and an earlier begin, in seconds since 1970, that returns a table with the columns of
`read_pairs`: the pairs since the time, and earlier ones of their queries since the begin, by which repeated pairs are
recognised."""


@dataclass(frozen=True, kw_only=True)
class RefreshOptions:
    """Hold what a refresh takes in besides pairs.

    Args:
        answers: a function of a time and a half-life, in seconds, that returns what was answered from that time to
            `until`: a table of `label_id` and its `places`, decayed to `until`. None: `exposed` stays as it is.
        whole_log: the log is the whole log, from which co-occurrence is made again.
        changes: label changes of a service; labels that were added become rows of the release.
        until: end of the pairs that count, in seconds since 1970; None: the time of the last pair.
        ahead: seconds until the next refresh, which a calendar forecasts; None: the horizon.
        unattended: refuse a forecast in which a label becomes popular all at once, as a flood of events makes it.
    """

    answers: Callable[[float, float], pa.Table] | None = None
    whole_log: bool = False
    changes: LabelChanges | None = None
    until: float | None = None
    ahead: float | None = None
    unattended: bool = False


def refresh_priors(
    releases: str | Path,
    priors: PriorTable | str | Path,
    *,
    source: str | None = None,
    name: str | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """Write a new release from an existing release's bundle and new priors.

    Neither the model nor the lists are trained again; scales and limits of the priors, spec and device stay.

    Args:
        source: name of the existing release; None: CURRENT.
    """
    target = open_releases(releases)
    before = target.verify(source or _current(target))
    if not before.bundle.priors.from_table:
        raise PriorsError(f"{before.name}: expected a release that was built with priors, found one without any")
    table = priors if isinstance(priors, PriorTable) else PriorTable(as_source(priors))
    values = table.read(before.bundle, like=before.bundle.priors, progress=progress)
    bundle = replace(before.bundle, priors=before.bundle.priors.with_table(values))
    return _build_like(target, before, bundle, free_name(target, name, before.manifest.bundle), progress)


def refresh(
    releases: str | Path,
    log: str | Path | PairReader,
    options: RefreshOptions | None = None,
    *,
    source: str | None = None,
    name: str | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """Write a new release from an existing one, with forecast and co-occurrence after later pairs; trains nothing.

    The prior `exposed` follows later answers. Where only co-occurrence changes, the index stays as it is.

    Args:
        log: a log or an export of feedback with later pairs; or a function that reads them.
        source: name of the existing release; None: CURRENT.

    Raises:
        NothingNewError: there is no pair and no answer that the release does not know.
        PriorsError: the release has neither forecast, co-occurrence nor, with `answers`, the prior `exposed`; or a
            label has become popular all at once.
    """
    options, target = options or RefreshOptions(), open_releases(releases)
    remove_stale(target.root)  # of refreshes that were killed, whose names differ
    before = target.open(source or _current(target))
    bundle, forecast = before.bundle, before.bundle.forecast
    known_until, columns = list[float](), list[LogColumns]()
    if (term := bundle.cooccurrence) is not None:
        known_until, columns = [term.settings.until or 0.0], [term.settings.log]
    if forecast is not None:
        known_until, columns = [*known_until, forecast.settings.until], [*columns, forecast.settings]
    exposed = None if options.answers is None else bundle.priors.exposed
    if not columns and exposed is None:
        raise PriorsError(
            f"{before.name}: expected a release whose bundle has a forecast or co-occurrence ([prior] or "
            "[cooccurrence] in its recipe), found neither"
        )
    # The earlier time: a pair that only one of the two terms knows must reach the other.
    begin, rows, newest, answers = min(known_until, default=0.0), pa.table({}), 0.0, pa.table({})
    if columns:
        rows = log(columns[0], begin, begin - _REPEATS) if callable(log) else read_pairs(log, columns[0], progress)
        rows = weighed(rows, columns[0], progress)
        newest = float(np.max(rows["time"].to_numpy(), initial=0.0))
    if options.answers is not None and exposed is not None:
        answers = options.answers(exposed[1].until or 0.0, exposed[1].half_life)
    has_pairs = newest > (0.0 if options.whole_log else begin)
    # A calendar moves π* in silence too, if the time of the refresh is known.
    is_seasonal = options.until is not None and forecast is not None and forecast.settings.calendar is not None
    if not has_pairs and not len(answers) and not is_seasonal:
        raise NothingNewError(
            f"{before.name}: expected pairs {'or answers ' if exposed else ''}later than those it knows, up to "
            f"{datetime.fromtimestamp(begin, UTC):%Y-%m-%d %H:%M}, found none"
        )
    if options.changes is not None:
        bundle = _with_added(bundle, options.changes, progress)
    # Then only co-occurrence has changed, which the index does not hold.
    keeps_rows = bundle is before.bundle and forecast is None and not len(answers)
    until = newest if options.until is None else options.until
    if has_pairs or is_seasonal:
        pairs = known_pairs(rows, bundle, progress)
        if bundle.forecast is not None:
            expected_L = bundle.forecast.log_popularity()
            bundle = _with_forecast(bundle, bundle.forecast, pairs, until, options.ahead, progress)
            if options.unattended:
                _check_moves(bundle, expected_L)
        if bundle.cooccurrence is not None:
            bundle = _with_pairs(bundle, bundle.cooccurrence, pairs, until, whole_log=options.whole_log)
    if len(answers):
        bundle = replace(bundle, priors=_with_answers(bundle, answers, until))
    name = free_name(target, name, before.manifest.bundle)
    with working_directory(target.root / f"{name}.bundle") as working:
        changed = replace(bundle, reports=before.bundle.stored_reports(), path=None)
        written = replace(changed.write(working / BUNDLE), priors=bundle.priors)
        if keeps_rows and before.manifest.collection is None:
            return ReleaseWriter(target, name, before.spec, progress).link(before, written)
        return _build_like(target, before, written, name, progress)


def _build_like(releases: Releases, before: Release, bundle: Bundle, name: str, progress: Progress) -> ReleaseManifest:
    """Write a release of a bundle with spec, lists and device of an earlier release."""
    manifest, queries, queries_like = before.manifest, None, None
    if before.queries is not None:
        # Embeddings of queries stay; log Z follows the new priors of labels.
        rows, queries_like = before.queries.bundle, before.queries.searcher.index
        vectors_QD, labels = np.asarray(rows.embeddings), rows.labels
        queries = query_bundle(bundle, labels.ids, vectors_QD, labels.counts, labels.display, progress)
    like = before.searcher.index if manifest.collection is None else None
    writer = ReleaseWriter(releases, name, before.spec, progress, manifest.filterable, manifest.registered)
    return writer.build(bundle, like, queries, queries_like)


def _current(releases: Releases) -> str:
    name = releases.current()
    if name is None:
        raise ReleaseNotFoundError(
            f"{releases}: expected a published release, or the path of one, found nothing published"
        )
    return name


def _with_added(bundle: Bundle, changes: LabelChanges, progress: Progress) -> Bundle:
    """Take label changes into a bundle, if they add labels."""
    if bundle.proposal is not None or all(id_ in bundle.labels.rows_by_id for id_ in changes.upserts):
        return bundle
    changed, report = with_changes(bundle, changes, hide=False)
    if report.skipped:
        progress(f"labels: {len(report.skipped):,} changes left out, the first {next(iter(report.skipped.items()))}")
    if not report.added:
        return bundle
    progress(f"labels: {report.added:,} that were added while serving are rows of the release")
    return changed


def _with_answers(bundle: Bundle, answers: pa.Table, until: float) -> Priors:
    """Add decayed places in later answers to the prior `exposed`."""
    assert bundle.priors.exposed is not None
    column, state = bundle.priors.exposed
    rows = find_rows(answers["label_id"].combine_chunks(), bundle.labels.ids)
    rows_n, counts_n = np.asarray(rows.drop_null(), np.int64), answers["places"].filter(rows.is_valid()).to_numpy()
    added_L = np.bincount(rows_n, counts_n, len(bundle.embeddings)).astype(np.float64)
    return bundle.priors.with_exposure(*state.counted(bundle.priors.values_LP[:, column], added_L, until))


def _with_forecast(
    bundle: Bundle, forecast: Forecast, pairs: NewPairs, until: float, ahead: float | None, progress: Progress
) -> Bundle:
    """Add later pairs to the forecast, from which log π follows."""
    # Never back in time: decay over a negative age would enlarge the sums.
    until = max(until, forecast.settings.until)
    pairs = pairs.chosen
    fresh = forecast.refreshed(pairs.queries, pairs.labels, pairs.times, until, pairs.of_types, ahead)
    progress(f"prior: {fresh.settings.comparison}")
    labels = replace(bundle.labels, log_popularity=fresh.log_popularity().astype(np.float32))
    return replace(bundle, labels=labels, forecast=fresh)


def _check_moves(bundle: Bundle, before_L: Float64) -> None:
    """Raise PriorsError if a label's share of choices has grown suspiciously.

    Args:
        before_L: log π* of the labels before the refresh, float64 [L].
    """
    assert bundle.labels.log_popularity is not None
    after_L = bundle.labels.log_popularity.astype(np.float64)
    moved_L = np.where(after_L > math.log(_NOTABLE_SHARE), after_L - before_L, -np.inf)
    row = int(moved_L.argmax())
    if moved_L[row] > _MOST_NATS:
        label = describe(bundle.labels.ids[row].as_py())
        raise PriorsError(
            f"expected no label's share of choices to grow more than {math.exp(_MOST_NATS):.0f} times in a refresh "
            f"that no person attends, found that of {label} go from {math.exp(before_L[row]):.2g} to "
            f"{math.exp(after_L[row]):.2g}; if its events are right, run longtail-index refresh --publish"
        )


def _with_pairs(bundle: Bundle, term: Cooccurrence, pairs: NewPairs, until: float, *, whole_log: bool) -> Bundle:
    """Add later pairs to co-occurrence and queries' last labels, or compute both from all pairs."""
    settings, remembered = term.settings, bundle.remembered
    since = -np.inf if whole_log or settings.until is None else settings.until
    sorted_pairs, ids_Q, earlier = pairs.by_query(since, until)
    if whole_log:
        (term,) = cooccurrences(sorted_pairs.chosen, bundle.manifest.labels, [settings])
        term = term.scaled(settings.scale, until=until)
        if remembered is not None:
            rows_Q = np.arange(1, len(ids_Q) + 1, dtype=np.int32)
            remembered = remember(sorted_pairs, Vocabulary(ids_Q), rows_Q, remembered.rows_QR.shape[1])
    else:
        until = until if settings.until is None else max(until, settings.until)
        term, remembered = refresh_term(term, sorted_pairs, ids_Q, remembered, until, earlier=earlier)
    manifest = bundle.manifest.model_copy(update={"cooccurrence": term.settings})
    return replace(bundle, manifest=manifest, cooccurrence=term, remembered=remembered)
