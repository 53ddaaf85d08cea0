"""Build a release: index a bundle, measure the index, and put both in one directory.

NAME/
  bundle/         every file of the bundle, hard-linked where the file system allows it
  index/          index.faiss, whose ids are label rows; lists.npy, the inverted list of every row;
                  priors.npy, the priors of every label
  queries/        the index of known queries, if there are any: a release whose rows are queries
  release.json    the bundle, the index, its measurements, and the sha256 of every file of index/ and queries/
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import faiss
import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from longtail.bundle import Bundle, FileRecord, LabelChanges, Priors, Vocabulary
from longtail.bundle.arrays import Float64
from longtail.bundle.cooccurrence import Cooccurrence
from longtail.bundle.errors import describe
from longtail.bundle.filterable import check_filterable
from longtail.bundle.forecast import Forecast
from longtail.bundle.histories import remember
from longtail.bundle.ids import find_rows
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256
from longtail.bundle.manifest import LogColumns
from longtail.bundle.neighbours import cooccurrences, refresh_term
from longtail.bundle.registry import RegisteredVersion, download_version, is_registered
from longtail.bundle.remote import local_bundle
from longtail.bundle.store import atomic_directory, file_sha256, link_or_copy, remove_stale, working_directory
from longtail.index.building.exposure import exposure_lines
from longtail.index.building.merge import with_changes
from longtail.index.building.milvus import tune_collection
from longtail.index.building.pairs import NewPairs, known_pairs, read_pairs, weighed
from longtail.index.building.priors import DerivedPriors, Limits, PriorTable
from longtail.index.building.queries import QueryTable, query_bundle
from longtail.index.building.tuning import TunedIndex, tune_index
from longtail.index.building.vectors import VectorFiles
from longtail.index.errors import LongtailIndexError, NothingNewError, PriorsError, ReleaseNotFoundError, SpecError
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.recall import Progress
from longtail.index.release.index_files import write_index
from longtail.index.release.release import BUNDLE, BUNDLE_MANIFEST, QUERIES, RELEASE_MANIFEST, Release, check_name
from longtail.index.release.releases import Releases
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.search.milvus_searcher import MilvusSearcher
from longtail.index.search.searcher import Searcher
from longtail.index.spec import IndexSpec
from longtail.tables import as_source

_MEASURED = (
    *("kind", "dim", "collection", "params_at", "recall_k", "recall_queries", "bytes_per_label", "kinds"),
    *("recall", "trials", "filtered"),
)
"""Fields of `ReleaseManifest` that are copied from `TunedIndex`."""
_MOST_NATS, _NOTABLE_SHARE = 4.0, 0.1
"""A label's share of choices that grows 55 times, to more than a tenth, is a flood rather than taste."""
_REPEATS = 7 * 86_400.0
"""Seconds before the last refresh in which earlier pairs are read; a service keeps events for 7 days by default."""


def build(
    bundle: Bundle | str | Path,
    releases: str | Path,
    *,
    spec: IndexSpec | str = "auto",
    name: str | None = None,
    device: Device = "cpu",
    priors: PriorTable | str | Path | None = None,
    bonuses: Mapping[str, Mapping[str, JsonValue]] = MappingProxyType({}),
    decay: Mapping[str, str] = MappingProxyType({}),
    slopes: Mapping[str, Limits | None] = MappingProxyType({}),
    exposed: str | None = None,
    progress: Progress = lambda _: None,
    filterable: Sequence[str] | None = None,
    lists_of: str | None = None,
    queries: QueryTable | str | Path | None = None,
) -> ReleaseManifest:
    """Index a bundle's labels, measure recall, and write a new release; publishes nothing.

    Args:
        bundle: a `Bundle` that was written or loaded, or its directory or URL, or `models:/NAME@ALIAS` in MLflow's
            registry. The bundle is read from its place and verified.
        releases: directory of releases, created if missing, or URL.
        spec: the kind of index, as an `IndexSpec` or its text: `flat`, `ivf_sq`, …
        name: name of the release; None: UTC time and the bundle's name.
        priors: place of a table of further numbers per label, each with a weight that requests choose, or a
            `PriorTable`.
        bonuses: filters by name, such as `{"promoted": {"seller": "s1"}}`: requests may give a bonus to labels that
            meet one, besides those of the buckets.
        decay: columns of dates by which requests may let scores decay, with the shortest half-life, such as
            `{"listed_at": "1d"}`.
        slopes: columns of numbers of which requests may add a multiple to scores, with limits of the weight; None:
            ±3 / σ.
        exposed: half-life of the prior `exposed`, the log of a label's share of the places in a service's answers, such
            as `7d`, or with limits of its weight, `7d=-1:0:-0.3`. It knows what CURRENT knows, and refreshes add to it.
        filterable: the only display columns that requests may filter by, with any number of values; None: all columns
            of supported types, except strings with very many values.
        lists_of: a release whose kind and lists the index takes over, so that nothing is clustered.
        queries: table of known queries, for `POST /v1/queries`, or a `QueryTable`.

    Raises:
        LongtailIndexError: the spec, device, name, priors or measured recall is wrong; no files are left.
        BundleError: the bundle is damaged, the release exists, or a column of `filterable` cannot be filtered by.
        OSError: the disk is full or not writable; no files are left.

    Example:
        `runs/model` is a bundle of 60 labels, as `longtail-train fit` writes one.

        >>> from longtail.index import build
        >>> manifest = build("runs/model", "releases", spec="flat", name="first")
        >>> manifest.name, manifest.kind, manifest.labels
        ('first', 'flat', 60)
        >>> {at.bias_removal: at.recall for at in manifest.recall}
        {-1.0: 1.0, -0.5: 1.0, 0.0: 1.0, 0.25: 1.0, 0.5: 1.0, 0.75: 1.0, 1.0: 1.0, 1.5: 1.0, 2.0: 1.0}

        A `Bundle` works too, such as `longtail.trainer.fit` returns.

        >>> from pathlib import Path
        >>> from longtail.bundle import Bundle
        >>> build(Bundle.load(Path("runs/model")), "releases", name="second").labels
        60
    """
    (path, registered), there = source_of(bundle), Releases(releases)
    spec = spec if isinstance(spec, IndexSpec) else IndexSpec(spec)
    source = Bundle.load(path)
    name = _free_name(there, name, source.manifest.name)
    if filterable is not None:
        filterable = check_filterable(source.labels.display, filterable)
    table = Priors() if priors is None else _table(priors).read(source, progress=progress)
    source = replace(source, priors=DerivedPriors(bonuses, decay, slopes, exposed).added_to(table, source))
    if exposed is not None and (published := there.current()) is not None:
        source = replace(source, priors=_with_earlier_exposure(source, there.open(published).bundle))
    like = None if lists_of is None else _index_of(there.verify(lists_of), source, spec)
    queries_bundle = None
    if queries is not None:
        queries = queries if isinstance(queries, QueryTable) else QueryTable(as_source(queries))
        queries_bundle = query_bundle(source, *queries.read(source, progress), progress)
    tuned = _tuned(source, spec, there, filterable, progress, device, like)
    return _write(there, name, source, tuned, spec, filterable, progress, device, registered, queries_bundle)


def build_from_vectors(
    labels: VectorFiles,
    releases: str | Path,
    *,
    spec: IndexSpec | str = "auto",
    name: str | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """Create a bundle from another library's vectors, and build a release of the bundle.

    Raises:
        LongtailIndexError: a file, the spec, the name or the measured recall is wrong; no files are left.
        BundleError: the contents of the files cannot form a bundle.
    """
    there = Releases(releases)
    name = _free_name(there, name, "vectors")
    with working_directory(there.root / f"{name}.bundle") as working:
        bundle = labels.read(name, progress).write(working / BUNDLE)
        if labels.queries is not None:
            for line in exposure_lines(bundle, labels.temperature):
                progress(line)
        return build(bundle, releases, spec=spec, name=name, progress=progress)


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
    there = Releases(releases)
    before = there.verify(source or _current(there))
    if not before.bundle.priors.from_table:
        raise PriorsError(f"{before.name}: expected a release that was built with priors, found one without any")
    table = _table(priors).read(before.bundle, like=before.bundle.priors, progress=progress)
    bundle = replace(before.bundle, priors=before.bundle.priors.with_table(table))
    return _again(there, before, bundle, name, progress)


def refresh(
    releases: str | Path,
    log: str | Path | Callable[[LogColumns, float, float], pa.Table],
    *,
    answers: Callable[[float, float], pa.Table] | None = None,
    whole: bool = False,
    changes: LabelChanges | None = None,
    source: str | None = None,
    name: str | None = None,
    until: float | None = None,
    ahead: float | None = None,
    unattended: bool = False,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """Write a new release from an existing one, with forecast and co-occurrence after later pairs; trains nothing.

    The prior `exposed` follows later answers. Where only co-occurrence changes, the index stays as it is.

    Args:
        log: a log or an export of feedback with later pairs; or a function of columns, a time and an earlier begin, in
            seconds since 1970, that returns a table with the columns of `read_pairs`: the pairs since the time, and
            earlier ones of their queries since the begin, by which repeated pairs are recognised.
        answers: a function of a time and a half-life, in seconds, that returns what was answered from that time to
            `until`: a table of `label_id` and its `places`, decayed to `until`. None: `exposed` stays as it is.
        whole: the log is the whole log, from which co-occurrence is made again.
        changes: label changes of a service; labels that were added become rows of the release.
        source: name of the existing release; None: CURRENT.
        until: end of the pairs that count, in seconds since 1970; None: the time of the last pair.
        ahead: seconds until the next refresh, which a calendar forecasts; None: the horizon.
        unattended: refuse a forecast in which a label becomes popular all at once, as a flood of events makes it.

    Raises:
        NothingNewError: there is no pair and no answer that the release does not know.
        PriorsError: the release has neither forecast, co-occurrence nor, with `answers`, the prior `exposed`; or a
            label has become popular all at once.
    """
    there = Releases(releases)
    remove_stale(there.root)  # of refreshes that were killed, whose names differ
    before = there.open(source or _current(there))
    bundle, since, columns = before.bundle, list[float](), list[LogColumns]()
    if (term := bundle.cooccurrence) is not None:
        since, columns = [term.settings.until or 0.0], [term.settings.log]
    if (forecast := bundle.forecast) is not None:
        since, columns = [*since, forecast.settings.until], [*columns, forecast.settings]
    exposed = None if answers is None else bundle.priors.exposed
    if not columns and exposed is None:
        raise PriorsError(
            f"{before.name}: expected a release whose bundle has a forecast or co-occurrence ([prior] or "
            "[cooccurrence] in its recipe), found neither"
        )
    begin, rows, newest, shown = min(since, default=0.0), pa.table({}), 0.0, pa.table({})
    if columns:
        rows = log(columns[0], begin, begin - _REPEATS) if callable(log) else read_pairs(log, columns[0], progress)
        rows = weighed(rows, columns[0], progress)
        newest = float(np.max(rows["time"].to_numpy(), initial=0.0))
    if answers is not None and exposed is not None:
        shown = answers(exposed[1].until or 0.0, exposed[1].half_life)
    later = newest > (0.0 if whole else begin)
    # A calendar moves π* in silence too, if the time of the refresh is known.
    seasonal = until is not None and forecast is not None and forecast.settings.calendar is not None
    if not later and not len(shown) and not seasonal:
        raise NothingNewError(
            f"{before.name}: expected pairs {'or answers ' if exposed else ''}later than those it knows, up to "
            f"{datetime.fromtimestamp(begin, UTC):%Y-%m-%d %H:%M}, found none"
        )
    bundle = bundle if changes is None else _with_added(bundle, changes, progress)
    until = newest if until is None else until
    same_rows = bundle is before.bundle and bundle.forecast is None and not len(shown)
    if later or seasonal:
        pairs = known_pairs(rows, bundle, progress)
        if bundle.forecast is not None:
            expected = bundle.forecast.log_popularity()
            bundle = _with_forecast_of(bundle, bundle.forecast, pairs, until, ahead, progress)
            if unattended:
                _check_moves(bundle, expected)
        if bundle.cooccurrence is not None:
            bundle = _with_pairs(bundle, bundle.cooccurrence, pairs, until, whole=whole)
    if len(shown):
        bundle = replace(bundle, priors=_with_answers(bundle, shown, until))
    name = _free_name(there, name, before.manifest.bundle)
    with working_directory(there.root / f"{name}.bundle") as working:
        changed = replace(bundle, reports=before.bundle.stored_reports(), path=None)
        written = replace(changed.write(working / BUNDLE), priors=bundle.priors)
        if same_rows and before.manifest.collection is None:
            return _with_index_of(there, before, written, name, progress)
        return _again(there, before, written, name, progress)


def _with_added(bundle: Bundle, changes: LabelChanges, progress: Progress) -> Bundle:
    """Take label changes into a bundle, if they add labels."""
    if bundle.proposal is not None or all(id_ in bundle.labels.row_of for id_ in changes.upserts):
        return bundle
    changed, report = with_changes(bundle, changes, hide=False)
    if report.skipped:
        progress(f"labels: {len(report.skipped):,} changes left out, the first {next(iter(report.skipped.items()))}")
    if not report.added:
        return bundle
    progress(f"labels: {report.added:,} that were added while serving are rows of the release")
    return changed


def _with_answers(bundle: Bundle, shown: pa.Table, until: float) -> Priors:
    """Add decayed places in later answers to the prior `exposed`."""
    assert bundle.priors.exposed is not None
    at, state = bundle.priors.exposed
    rows = find_rows(shown["label_id"].combine_chunks(), bundle.labels.ids)
    rows_n, places_n = np.asarray(rows.drop_null(), np.int64), shown["places"].filter(rows.is_valid()).to_numpy()
    added_L = np.bincount(rows_n, places_n, len(bundle.embeddings)).astype(np.float64)
    return bundle.priors.with_exposure(*state.counted(bundle.priors.values_LP[:, at], added_L, until))


def _with_earlier_exposure(bundle: Bundle, published: Bundle) -> Priors:
    """Take over what the published release knows of answers, by the ids of labels."""
    exposed, earlier = bundle.priors.exposed, published.priors.exposed
    if exposed is None or earlier is None or earlier[1].until is None:
        return bundle.priors
    rows = find_rows(bundle.labels.ids, published.labels.ids)
    values_n = published.priors.values_LP[np.asarray(rows.drop_null(), np.int64), earlier[0]]
    places_L = np.zeros(len(rows))
    places_L[np.asarray(rows.is_valid())] = earlier[1].decayed_exposures(values_n)
    state, places_L = exposed[1].counted(np.zeros(len(rows), np.float32), places_L, earlier[1].until)
    return bundle.priors.with_exposure(state, places_L)


def _with_forecast_of(
    bundle: Bundle, forecast: Forecast, pairs: NewPairs, until: float, ahead: float | None, progress: Progress
) -> Bundle:
    """Add later pairs to the forecast, from which log π follows."""
    until = max(until, forecast.settings.until)
    pairs = pairs.chosen
    fresh = forecast.refreshed(pairs.queries, pairs.labels, pairs.times, until, pairs.of_types, ahead)
    progress(f"prior: {fresh.settings.comparison}")
    labels = replace(bundle.labels, log_popularity=fresh.log_popularity().astype(np.float32))
    return replace(bundle, labels=labels, forecast=fresh)


def _check_moves(bundle: Bundle, before_L: Float64) -> None:
    """Raise PriorsError if a label's share of choices has grown past what a person should look at.

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


def _with_pairs(bundle: Bundle, term: Cooccurrence, pairs: NewPairs, until: float, *, whole: bool) -> Bundle:
    """Add later pairs to co-occurrence and to the last labels of queries, or make both again from all pairs."""
    settings, remembered = term.settings, bundle.remembered
    since = -np.inf if whole or settings.until is None else settings.until
    sorted_pairs, ids_Q, earlier = pairs.by_query(since, until)
    if whole:
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


def _again(there: Releases, before: Release, bundle: Bundle, name: str | None, progress: Progress) -> ReleaseManifest:
    """Write a release of a bundle with spec, lists and device of the release `before`."""
    name, manifest = _free_name(there, name, before.manifest.bundle), before.manifest
    like = None if isinstance(before.searcher, MilvusSearcher) else before.searcher.index
    queries_bundle, lists = None, None
    if before.queries is not None and isinstance(before.queries.searcher, Searcher):
        # Embeddings of queries stay; log Z follows the new priors of labels.
        rows, lists = before.queries.bundle, before.queries.searcher.index
        vectors_QD, labels = np.asarray(rows.embeddings), rows.labels
        queries_bundle = query_bundle(bundle, labels.ids, vectors_QD, labels.counts, labels.display, progress)
    tuned = _tuned(bundle, before.spec, there, manifest.filterable, progress, manifest.device, like)
    return _write(
        there, name, bundle, tuned, before.spec, manifest.filterable, progress, manifest.device, manifest.registered,
        queries_bundle, lists,
    )  # fmt: skip


def _with_index_of(there: Releases, before: Release, bundle: Bundle, name: str, progress: Progress) -> ReleaseManifest:
    """Write a release of a bundle with the rows of the release `before`, whose index is linked."""
    progress(f"write {name} to {there}")
    with atomic_directory(there.root / name) as working:
        _link_bundle(source_of(bundle)[0], bundle, working / BUNDLE)
        _link(before.path, working, before.manifest.files)
        manifest = before.manifest.model_copy(
            update={
                "name": name,
                "created_at": datetime.now(UTC),
                "bundle_sha256": file_sha256(working / BUNDLE_MANIFEST),
            }
        ).sealed()
        (working / RELEASE_MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    there.shelf.complete(name)
    return manifest


def _table(priors: PriorTable | str | Path) -> PriorTable:
    return priors if isinstance(priors, PriorTable) else PriorTable(as_source(priors))


def _index_of(before: Release, bundle: Bundle, spec: IndexSpec) -> FaissIndex:
    """Get a release's index, if another bundle can take over its kind and lists."""
    name, kind, dim = before.name, before.manifest.kind, before.manifest.dim
    if isinstance(before.searcher, MilvusSearcher):
        raise SpecError(
            f"lists of {name}: expected a release of FAISS, found one of Milvus, which trains its own lists"
        )
    if spec.text not in ("auto", kind):
        raise SpecError(f"lists of {name}: expected the spec auto or {kind}, which they are of, received {spec.text}")
    received = bundle.rows(np.arange(1)).shape[1]
    if before.searcher.index.has_lists and received != dim:
        raise LongtailIndexError(
            f"lists of {name}: expected rows of {dim} coordinates (embedding, λ, μ, priors), received {received}; "
            "build without these lists"
        )
    return before.searcher.index


def _tuned(
    bundle: Bundle,
    spec: IndexSpec,
    there: Releases,
    filterable: Sequence[str] | None,
    progress: Progress,
    device: Device,
    like: FaissIndex | None,
) -> TunedIndex:
    _ = bundle.labels.lifetimes  # refuses wrong ones before the work
    if spec.milvus:
        return tune_collection(bundle, spec, there.milvus(), filterable, progress)
    return tune_index(bundle, spec, device, progress, like)


def _write(
    there: Releases,
    name: str,
    bundle: Bundle,
    tuned: TunedIndex,
    spec: IndexSpec,
    filterable: Sequence[str] | None,
    progress: Progress,
    device: Device,
    registered: RegisteredVersion | None,
    queries: Bundle | None = None,
    like: FaissIndex | None = None,
) -> ReleaseManifest:
    """Write a bundle and its index as a release, completely or not at all.

    Where the releases are at a URL, the release is uploaded afterwards.

    Args:
        queries: the bundle of an index of queries, which is built exact if `spec` is, else as `auto`.
        like: an earlier index of queries whose lists it takes over.
    """
    progress(f"write {name} to {there}")
    # The collection is held first: a prune that runs between these steps must not drop it.
    with there.collections.held(name, tuned.collection), atomic_directory(there.root / name) as working:
        _link_bundle(source_of(bundle)[0], bundle, working / BUNDLE)
        files = write_index(working, tuned.index, bundle.priors)
        if queries is not None:
            files |= _write_queries(working, queries, spec, progress, like)
        manifest = ReleaseManifest(
            name=name,
            created_at=datetime.now(UTC),
            bundle=bundle.manifest.name,
            bundle_sha256=file_sha256(working / BUNDLE_MANIFEST),
            registered=registered,
            spec=spec.text,
            labels=len(bundle.embeddings),
            priors=list(bundle.priors.settings),
            factory=None if tuned.index is None else tuned.index.factory,
            head_lists=0 if tuned.index is None else tuned.index.head_lists,
            params=tuned.chosen.params,
            recall_floor=spec.recall_floor,
            device=device,
            build_seconds=round(tuned.seconds, 2),
            faiss=faiss.__version__,
            queries=0 if queries is None else len(queries.embeddings),
            filterable=None if filterable is None else list(filterable),
            files=files,
            **{name: getattr(tuned, name) for name in _MEASURED},
        ).sealed()
        (working / RELEASE_MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    there.shelf.complete(name)
    return manifest


def _write_queries(
    working: Path, queries: Bundle, spec: IndexSpec, progress: Progress, like: FaissIndex | None
) -> dict[str, FileRecord]:
    """Write an index of queries as a release inside a release; returns the records of its files."""
    spec = IndexSpec("flat" if spec.text == "flat" else "auto", spec.recall_floor)
    tuned = tune_index(queries, spec, "cpu", lambda line: progress(f"index of queries: {line}"), like)
    lowest = tuned.chosen.lowest.recall
    progress(f"queries: {tuned.kind} over {len(queries.embeddings):,}, recall@{tuned.recall_k} {lowest:.3f} or more")
    with working_directory(working / f"{QUERIES}.bundle") as folder:
        written = replace(queries.write(folder / BUNDLE), priors=queries.priors)
        _write(Releases(working), QUERIES, written, tuned, spec, None, lambda _: None, "cpu", None)
    files = [path for path in sorted((working / QUERIES).rglob("*")) if path.is_file()]
    return {
        path.relative_to(working).as_posix(): FileRecord(sha256=file_sha256(path), bytes=path.stat().st_size)
        for path in files
    }


def source_of(bundle: Bundle | str | Path) -> tuple[Path, RegisteredVersion | None]:
    """Get the directory of a bundle, or of a copy, and its registered version, if it has one.

    Raises LongtailIndexError for a bundle without a path.
    """
    if not isinstance(bundle, Bundle):
        return download_version(str(bundle)) if is_registered(bundle) else (local_bundle(bundle), None)
    if bundle.path is None:
        raise LongtailIndexError(
            "build: expected a bundle that was written or loaded, received one without a path; Bundle.write returns "
            "the bundle with its path"
        )
    return bundle.path, None


def _link_bundle(source: Path, bundle: Bundle, target: Path) -> None:
    """Hard-link the bundle's files, or copy them where the file system cannot link."""
    _link(source, target, (MANIFEST, MANIFEST_SHA256, *bundle.manifest.files))


def _link(source: Path, target: Path, names: Iterable[str]) -> None:
    """Hard-link files of a directory, or copy them; raises LongtailIndexError."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            link_or_copy(source / name, target / name)
        except FileNotFoundError as error:
            raise LongtailIndexError(
                f"{source}: {name} was deleted while its release was written, perhaps by prune; run again"
            ) from error


def _current(there: Releases) -> str:
    name = there.current()
    if name is None:
        raise ReleaseNotFoundError(f"{there}: expected a published release, or --from NAME, found nothing published")
    return name


def _free_name(there: Releases, name: str | None, bundle_name: str) -> str:
    """Check that a name is free; None: create one from UTC time and the bundle's name.

    A number is appended if the created name exists.
    """
    if name is None:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", bundle_name)[:64]
        name = base = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{plain}"
        again = 1
        while (there.root / name).exists():
            again += 1
            name = f"{base}-{again}"
    there.shelf.refuse_existing(check_name(name))
    return name
