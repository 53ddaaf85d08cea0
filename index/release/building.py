"""Build a release: a bundle's index, measured, and both of them in one directory.

NAME/
  bundle/         every file of the bundle, hard-linked where the disk allows it
  index/          manifest.json; index.faiss, whose ids are label rows; lists.npy, the inverted list of every row;
                  head.rows.npy and head.vectors.npy, the exact head; with priors priors.npy; what finds labels
                  and vocabularies' ids, lookup.arrow and vocabularies/
  release.json    which bundle, which index, the sha256 of every file of index/
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from longtail.bundle import Bundle, Priors, atomic_directory, sha256_of
from longtail.bundle.filterable import check_filterable
from longtail.bundle.remote import local_bundle
from longtail.index.construct.collection import tune_collection
from longtail.index.construct.priors import PriorTable
from longtail.index.construct.recall import Progress
from longtail.index.construct.refill import Changes, imbalance_of, refill_index
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.tuning import TunedIndex, tune_index
from longtail.index.errors import LongtailIndexError, PriorsError, ReleaseNotFoundError
from longtail.index.manifests import Device, Partition, ReleaseManifest
from longtail.index.release.index_files import manifest_bytes, write_file, write_index
from longtail.index.release.release import BUNDLE, BUNDLE_MANIFEST, RELEASE_MANIFEST, Release, check_name
from longtail.index.release.releases import Releases
from longtail.index.search.collection import CollectionSearcher
from longtail.state import read_label_changes


def build(
    bundle: Bundle | str | Path,
    releases: str | Path,
    *,
    spec: IndexSpec | str | None = None,
    name: str | None = None,
    device: Device = "cpu",
    priors: PriorTable | str | Path | None = None,
    progress: Progress = lambda _: None,
    filterable: Sequence[str] | None = None,
    bytes_per_label: float | None = None,
) -> ReleaseManifest:
    """Build an index over a bundle's labels, measure its recall, and write both as a new release; publishes nothing.

    Args:
        bundle: a bundle that was written or loaded, or its directory or URL; read and verified from there.
        releases: directory of releases, made if missing, or URL.
        spec: what to build, an `IndexSpec` or its text, such as `flat` or `ivf_pq`; `auto` when None.
        name: the release's name; UTC time and the bundle's name when None.
        device: where FAISS trains.
        priors: further numbers per label, each with a weight that requests choose; a table, or what to make of one.
        progress: told what is being done, one line at a time.
        filterable: display columns that requests may filter by, of any number of values, and no others; None: all that
            filters are for, but strings of very many values.
        bytes_per_label: as of `IndexSpec`, which may say it itself.

    Returns:
        What release.json says: the name, the kind of index, its recall at every measured λ.

    Raises:
        LongtailIndexError: the spec, the device, the name, the priors or the measured recall, or a `Bundle` without a
            path; nothing is left behind.
        BundleError: the bundle is not intact, the release exists, or a column that cannot be filtered by.
        OSError: the disk is full or not writable; nothing is left behind.

    Example:
        `runs/model` is a bundle of 60 labels, as `longtail-train fit` writes one.

        >>> from longtail.index import build
        >>> manifest = build("runs/model", "releases", spec="flat", name="first")
        >>> manifest.name, manifest.kind, manifest.labels
        ('first', 'flat', 60)
        >>> {at.bias_removal: at.recall for at in manifest.recall}
        {-1.0: 1.0, 0.0: 1.0, 0.5: 1.0, 1.0: 1.0, 2.0: 1.0}

        A `Bundle` will do as well, such as `longtail.trainer.fit` returns.

        >>> from pathlib import Path
        >>> from longtail.bundle import Bundle
        >>> build(Bundle.load(Path("runs/model")), "releases", name="second").labels
        60
    """
    path, there = path_of(bundle), Releases(releases)
    if not isinstance(spec, IndexSpec):
        spec = IndexSpec() if spec is None else IndexSpec(spec)
    if bytes_per_label is not None:
        spec = replace(spec, bytes_per_label=bytes_per_label)
    source = Bundle.load(path)
    created_at = datetime.now(UTC)
    name = _unused_name(there.root, created_at, source.manifest.name) if name is None else check_name(name)
    there.shelf.refuse_existing(name)
    if filterable is not None:
        filterable = check_filterable(source.labels.display, filterable)
    if priors is not None:
        table = priors if isinstance(priors, PriorTable) else PriorTable(Path(priors))
        source = replace(source, priors=table.read(source, progress=progress))
    tuned = _tuned(source, spec, device, filterable, there, progress)
    return _write(there, name, created_at, source, tuned, spec, device, filterable, progress)


def _tuned(
    bundle: Bundle,
    spec: IndexSpec,
    device: Device,
    filterable: Sequence[str] | None,
    there: Releases,
    progress: Progress,
) -> TunedIndex:
    """An index over a bundle's labels: FAISS's, or a collection of Milvus."""
    if spec.milvus:
        return tune_collection(bundle, spec, there.milvus(), filterable, progress)
    return tune_index(bundle, spec, device, progress)


def refresh_priors(
    releases: str | Path,
    priors: PriorTable | str | Path,
    *,
    source: str | None = None,
    name: str | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """A new release of the same bundle and index whose priors are read anew; publishes nothing.

    Neither the model nor the index is trained again: every label's row is moved to where it belongs now, and recall is
    measured again.

    Args:
        releases: directory or URL of releases.
        priors: a table with the same priors, or what to make of one.
        source: the release with the priors of before; CURRENT when None.
        name: the new release's name; UTC time and the bundle's name when None.
        progress: told what is being done, one line at a time.

    Raises:
        LongtailIndexError: no such release, one without priors, the table, or a recall below the release's floor;
            nothing is left behind.
        BundleError: the release's bundle is not intact, or the new release exists.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    there = Releases(releases)
    before = there.verify(source or _current(there))
    if before.bundle.priors is None:
        raise PriorsError(f"{before.name}: expected a release that was built with priors, found one without any")
    created_at = datetime.now(UTC)
    name = _unused_name(there.root, created_at, before.manifest.bundle) if name is None else check_name(name)
    there.shelf.refuse_existing(name)
    table = priors if isinstance(priors, PriorTable) else PriorTable(Path(priors))
    bundle = replace(before.bundle, priors=table.read(before.bundle, like=before.bundle.priors, progress=progress))
    tuned = _refilled(before, bundle, None, there, progress)
    return _write_like(before, there, name, created_at, bundle, tuned, progress)


def update(
    bundle: Bundle | str | Path,
    releases: str | Path,
    *,
    source: str | None = None,
    name: str | None = None,
    priors: PriorTable | str | Path | None = None,
    log: str | Path | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """A new release of a bundle over the cells of one before, where labels came, went or changed; publishes nothing.

    Of a release whose rows Milvus holds, a new collection is written.

    Nothing is clustered: a label whose embedding is what it was stays in its cell, others go to the nearest. The exact
    head keeps its labels. Recall is measured again, held to the release's floor, and effort grows where it has to.

    Args:
        bundle: what to index, such as `merge_labels` or a further epoch of training writes it; read and verified.
        releases: directory or URL of releases.
        source: the release whose cells are kept; CURRENT when None.
        name: the new release's name; UTC time and the bundle's name when None.
        priors: a table with the priors of the release, or what to make of one. None: labels keep their values, and new
            ones get each prior's `missing`.
        log: label changes that were merged into the bundle, as `merge_labels` takes them, in place of a table: labels
            get the priors that they came with.
        progress: told what is being done, one line at a time.

    Returns:
        What release.json says.

    Raises:
        LongtailIndexError: no such release, rows of another width, the priors, or a recall
            below the release's floor; nothing is left behind.
        StoreError: as `merge_labels`.
        BundleError: the bundle or the release's is not intact, the new release exists, or the bundle lacks a
            column that requests filter by.
        OSError: the disk is full or not writable; nothing is left behind.

    Example:
        >>> from longtail.index import build, publish, update
        >>> _ = build("runs/model", "releases", spec="ivf_flat", name="first")
        >>> _ = publish("releases", "first")
        >>> update("runs/model", "releases", name="again").labels
        60
    """
    path, there = path_of(bundle), Releases(releases)
    taken = Bundle.load(path)
    before = there.verify(source or _current(there))
    created_at = datetime.now(UTC)
    name = _unused_name(there.root, created_at, taken.manifest.name) if name is None else check_name(name)
    there.shelf.refuse_existing(name)
    if _width(taken) != _width(before.bundle):
        asked, given = (
            "{} dimensions and {} more coordinates".format(*_width(each)) for each in (before.bundle, taken)
        )
        raise LongtailIndexError(
            f"update: expected embeddings of {asked}, for λ, μ and label biases, as {before.name} has them, received "
            f"{given}: build a release of their own"
        )
    if before.index.filterable is not None:
        check_filterable(taken.labels.display, before.index.filterable)
    changes = Changes.between(before.bundle, taken)
    taken = replace(taken, priors=_priors_after(before, taken, changes, priors, log, progress))
    progress(
        f"cells of {before.name}: {changes.added:,} labels added, {changes.moved:,} embedded anew, "
        f"{changes.removed:,} removed"
    )
    tuned = _refilled(before, taken, changes, there, progress)
    return _write_like(before, there, name, created_at, taken, tuned, progress)


def _width(bundle: Bundle) -> tuple[int, int]:
    """Coordinates of a row without priors: of the embedding, and beside it."""
    return bundle.embeddings.shape[1], replace(bundle, priors=None).augmentation.extra_dims


def _refilled(
    before: Release, bundle: Bundle, changes: Changes | None, there: Releases, progress: Progress
) -> TunedIndex:
    """The index of a release over the labels of a bundle; Milvus trains cells of its own."""
    spec, searcher, kept = before.spec, before.searcher, before.index.partition
    if isinstance(searcher, CollectionSearcher):
        return tune_collection(bundle, spec, there.milvus(), before.index.filterable, progress)
    trained = imbalance_of(searcher.index)
    tuned = refill_index(bundle, spec, searcher.index, before.index.effort, progress, changes)
    if changes is None:
        return replace(tuned, partition=kept)
    now = None if tuned.index is None else imbalance_of(tuned.index)
    if trained is None or now is None:
        return tuned
    kept = kept or Partition(trained_by=before.name, newer=0, imbalance=trained, imbalance_trained=trained)
    newer = kept.newer + changes.added + changes.moved
    return replace(tuned, partition=kept.model_copy(update={"newer": newer, "imbalance": round(now, 3)}))


def _priors_after(
    before: Release,
    bundle: Bundle,
    changes: Changes,
    table: PriorTable | str | Path | None,
    log: str | Path | None,
    progress: Progress,
) -> Priors | None:
    """The priors of a release for another bundle's labels.

    Raises:
        PriorsError: a table for a release without priors, one that does not have its priors, a table and a log, or no
            such log.
    """
    had = before.bundle.priors
    if table is not None and log is not None:
        raise PriorsError(
            "update: expected the priors of all labels in a table, or those of labels that came in a log, received both"
        )
    try:
        came = {} if log is None else read_label_changes(log).upserts
    except FileNotFoundError as error:
        raise PriorsError(str(error)) from None
    if had is None:
        if table is not None:
            raise PriorsError(f"{before.name}: expected a release that was built with priors, found one without any")
        return None
    if table is not None:
        table = table if isinstance(table, PriorTable) else PriorTable(Path(table))
        return table.read(bundle, like=had, progress=progress)
    given = [came[id_].priors if id_ in came else {} for id_ in bundle.labels.ids.to_pylist()]
    return Priors(had.settings, had.of_added(changes.before_L, given))


def _write_like(
    before: Release,
    there: Releases,
    name: str,
    created_at: datetime,
    bundle: Bundle,
    tuned: TunedIndex,
    progress: Progress,
) -> ReleaseManifest:
    """Write a release built like one before."""
    return _write(there, name, created_at, bundle, tuned, before.spec, "cpu", before.index.filterable, progress)


def _write(
    there: Releases,
    name: str,
    created_at: datetime,
    bundle: Bundle,
    tuned: TunedIndex,
    spec: IndexSpec,
    device: Device,
    filterable: Sequence[str] | None,
    progress: Progress,
) -> ReleaseManifest:
    """Write a bundle and its index as a release, whole or not at all, and upload it where releases are at a URL."""
    progress(f"write {name} to {there}")
    with there.collections.held(name, tuned.collection), atomic_directory(there.root / name) as working:
        _link_bundle(path_of(bundle), bundle, working / BUNDLE)
        bundle_sha256 = sha256_of(working / BUNDLE_MANIFEST)
        index, files = write_index(
            working,
            tuned,
            spec=spec,
            bundle=bundle,
            bundle_sha256=bundle_sha256,
            device=device,
            filterable=filterable,
        )
        manifest = ReleaseManifest(
            name=name,
            created_at=created_at,
            bundle=bundle.manifest.name,
            bundle_sha256=bundle_sha256,
            labels=index.labels,
            spec=index.spec,
            kind=index.kind,
            recall_k=index.recall_k,
            recall=index.recall,
            files=files,
        ).sealed()
        write_file(working / RELEASE_MANIFEST, manifest_bytes(manifest))
    there.shelf.complete(name)
    return manifest


def path_of(bundle: Bundle | str | Path) -> Path:
    """Get the directory of a bundle; raises LongtailIndexError for one without a path."""
    if not isinstance(bundle, Bundle):
        return local_bundle(bundle)
    if bundle.path is None:
        raise LongtailIndexError(
            "build: expected a bundle that was written or loaded, received one without a path; Bundle.write returns "
            "the bundle with its path"
        )
    return bundle.path


def _link_bundle(source: Path, bundle: Bundle, target: Path) -> None:
    """Hard-link the bundle's files, or copy them where the file system cannot link."""
    for name in ("manifest.json", "manifest.sha256", *bundle.manifest.files):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        file = (source / name).resolve()
        try:
            os.link(file, target / name)
        except OSError:
            shutil.copyfile(file, target / name)


def _current(there: Releases) -> str:
    name = there.current()
    if name is None:
        raise ReleaseNotFoundError(f"{there}: expected a published release, or --from NAME, found nothing published")
    return name


def _unused_name(releases: Path, created_at: datetime, bundle_name: str) -> str:
    """UTC time and the bundle's name, and a number where that release exists."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", bundle_name)[:64]
    base = f"{created_at:%Y%m%dT%H%M%SZ}-{plain}"
    name, again = base, 1
    while (releases / name).exists():
        again += 1
        name = f"{base}-{again}"
    return name
