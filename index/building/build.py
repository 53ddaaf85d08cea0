"""Build a release from a bundle: make its priors, index it, measure the index, and write both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from longtail.bundle import Bundle, Priors
from longtail.bundle.filterable import check_filterable
from longtail.bundle.ids import find_rows
from longtail.bundle.objects import is_url, local_path
from longtail.bundle.registry import RegisteredVersion, download_version, is_registered
from longtail.bundle.remote import download_bundle
from longtail.bundle.store import working_directory
from longtail.index.building.exposure import describe_exposure
from longtail.index.building.priors import PriorSpec, PriorTable
from longtail.index.building.queries import KnownQueries, query_bundle
from longtail.index.building.vectors import VectorFiles
from longtail.index.building.writing import ReleaseWriter, free_name
from longtail.index.errors import LongtailIndexError, SpecError
from longtail.index.manifests import ReleaseManifest
from longtail.index.recall import Progress
from longtail.index.release.release import BUNDLE, Release
from longtail.index.release.releases import open_releases
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.spec import IndexSpec
from longtail.tables import as_source


def build(
    bundle: Bundle | str | Path,
    releases: str | Path,
    *,
    spec: IndexSpec | str = "auto",
    name: str | None = None,
    priors: PriorSpec | PriorTable | str | Path | None = None,
    filterable: Sequence[str] | None = None,
    queries: KnownQueries | str | Path | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """Index a bundle's labels, measure recall, and write a new release; publishes nothing.

    Args:
        bundle: a `Bundle` that was written or loaded, or its directory or URL, or `models:/NAME@ALIAS` in MLflow's
            registry. The files of the bundle are read again and verified.
        releases: directory of releases, created if missing, or URL.
        spec: the kind of index, as an `IndexSpec` or its text: `flat`, `ivf_sq`, …
        name: name of the release; None: UTC time and the bundle's name.
        priors: a table of further numbers per label, each with a weight that requests choose; or a `PriorSpec`, which
            also derives priors from columns of the labels and from answers.
        filterable: the only display columns that requests may filter by, with any number of values; None: all columns
            of supported types, except strings with very many values.
        queries: table of known queries, for `POST /v1/queries`, or a `KnownQueries`.

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

        A `Bundle` works too, for example the result of `longtail.trainer.fit`.

        >>> from pathlib import Path
        >>> from longtail.bundle import Bundle
        >>> build(Bundle.load(Path("runs/model")), "releases", name="second").labels
        60
    """
    (path, registered), target = bundle_path(bundle), open_releases(releases)
    spec = spec if isinstance(spec, IndexSpec) else IndexSpec(spec)
    priors = priors if isinstance(priors, PriorSpec) else PriorSpec(priors)
    # Without towers, whose files are linked into the release unread.
    loaded = Bundle.load(path, towers=False)
    name = free_name(target, name, loaded.manifest.name)
    if filterable is not None:
        filterable = check_filterable(loaded.labels.display, filterable)
    loaded = replace(loaded, priors=priors.read(loaded, progress))
    if priors.exposed is not None and (published := target.current()) is not None:
        loaded = replace(loaded, priors=_with_earlier_exposure(loaded, target.open(published).bundle))
    like = None if spec.lists_of is None else _index_to_reuse(target.verify(spec.lists_of), loaded, spec)
    queries_bundle = None
    if queries is not None:
        source = queries if isinstance(queries, KnownQueries) else KnownQueries(as_source(queries))
        queries_bundle = query_bundle(loaded, *source.read(loaded, progress), progress)
    writer = ReleaseWriter(target, name, spec, progress, filterable, registered)
    return writer.build(loaded, like, queries_bundle)


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
    target = open_releases(releases)
    name = free_name(target, name, "vectors")
    with working_directory(target.root / f"{name}.bundle") as working:
        bundle = labels.read(name, progress).write(working / BUNDLE)
        if labels.queries is not None:
            for line in describe_exposure(bundle, labels.temperature):
                progress(line)
        return build(bundle, releases, spec=spec, name=name, progress=progress)


def bundle_path(bundle: Bundle | str | Path) -> tuple[Path, RegisteredVersion | None]:
    """Get the directory of a bundle or its copy, and its registered version, if any.

    Raises LongtailIndexError for a bundle without a path.
    """
    if not isinstance(bundle, Bundle):
        if is_registered(bundle):
            return download_version(str(bundle))
        return download_bundle(str(bundle)) if is_url(bundle) else local_path(bundle), None
    if bundle.path is None:
        raise LongtailIndexError(
            "build: expected a bundle that was written or loaded, received one without a path; Bundle.write returns "
            "the bundle with its path"
        )
    return bundle.path, None


def _with_earlier_exposure(bundle: Bundle, published: Bundle) -> Priors:
    """Take over what the published release knows of answers, by the ids of labels."""
    exposed, earlier = bundle.priors.exposed, published.priors.exposed
    if exposed is None or earlier is None or earlier[1].until is None:
        return bundle.priors
    rows = find_rows(bundle.labels.ids, published.labels.ids)
    values_n = published.priors.values_LP[np.asarray(rows.drop_null(), np.int64), earlier[0]]
    counts_L = np.zeros(len(rows))
    counts_L[np.asarray(rows.is_valid())] = earlier[1].decayed_exposures(values_n)
    state, counts_L = exposed[1].counted(np.zeros(len(rows), np.float32), counts_L, earlier[1].until)
    return bundle.priors.with_exposure(state, counts_L)


def _index_to_reuse(before: Release, bundle: Bundle, spec: IndexSpec) -> FaissIndex:
    """Get a release's index, if another bundle can take over its kind and lists."""
    name, kind, dim = before.name, before.manifest.kind, before.manifest.dim
    if before.manifest.collection is not None:
        raise SpecError(
            f"lists of {name}: expected a release of FAISS, found one of Milvus, which trains its own lists"
        )
    if spec.text not in ("auto", kind):
        raise SpecError(
            f"lists of {name}: expected the spec auto or {kind}, the kind of these lists, received {spec.text}"
        )
    received = bundle.rows(np.arange(1)).shape[1]
    if before.searcher.index.has_lists and received != dim:
        raise LongtailIndexError(
            f"lists of {name}: expected rows of {dim} coordinates (embedding, λ, μ, priors), received {received}; "
            "build without these lists"
        )
    return before.searcher.index
