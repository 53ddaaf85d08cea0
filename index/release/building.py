"""Build a release: a bundle's index, measured, and both of them in one directory.

NAME/
  bundle/         every file of the bundle, hard-linked where the disk allows it
  index/          index.faiss, whose ids are label rows; lists.npy, the inverted list of every row;
                  head.rows.npy and head.vectors.npy, the exact head; with priors priors.npy
  release.json    which bundle, which index, what was measured of it, the sha256 of every file of index/
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import faiss

from longtail.bundle import Bundle, Priors, atomic_directory, sha256_of
from longtail.bundle.filterable import check_filterable
from longtail.bundle.integrity import MANIFEST, MANIFEST_SHA256
from longtail.bundle.remote import local_bundle
from longtail.index.construct.collection import tune_collection
from longtail.index.construct.priors import PriorTable
from longtail.index.construct.recall import Progress
from longtail.index.construct.refill import Changes, imbalance_of, refill_index
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.tuning import TunedIndex, tune_index
from longtail.index.errors import LongtailIndexError, PriorsError, ReleaseNotFoundError
from longtail.index.manifests import Device, Partition, ReleaseManifest
from longtail.index.release.index_files import write_index
from longtail.index.release.release import BUNDLE, BUNDLE_MANIFEST, RELEASE_MANIFEST, Release, check_name
from longtail.index.release.releases import Releases
from longtail.index.search.collection import CollectionSearcher
from longtail.state import read_label_changes
from longtail.tables import as_place

_MEASURED = (
    *("kind", "dim", "collection", "efforts", "recall_k", "recall_queries", "bytes_per_label", "kinds", "curve"),
    *("recall", "trials", "filtered", "partition"),
)
"""What a manifest says as the build found it."""


def build(
    bundle: Bundle | str | Path,
    releases: str | Path,
    *,
    spec: IndexSpec | str = "auto",
    name: str | None = None,
    device: Device = "cpu",
    priors: PriorTable | str | Path | None = None,
    progress: Progress = lambda _: None,
    filterable: Sequence[str] | None = None,
) -> ReleaseManifest:
    """Build an index over a bundle's labels, measure its recall, and write both as a new release; publishes nothing.

    Args:
        bundle: a bundle that was written or loaded, or its directory or URL; read and verified from there.
        releases: directory of releases, made if missing, or URL.
        spec: what to build, an `IndexSpec` or its text, such as `flat` or `ivf_pq`.
        name: the release's name; UTC time and the bundle's name when None.
        device: where FAISS trains.
        priors: further numbers per label, each with a weight that requests choose; a table, or what to make of one.
        progress: called with what is being done, one line at a time.
        filterable: display columns that requests may filter by, of any number of values, and no others; None: all that
            filters are for, but strings of very many values.

    Raises:
        LongtailIndexError: the spec, the device, the name, the priors or the measured recall; nothing is left behind.
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
    spec = spec if isinstance(spec, IndexSpec) else IndexSpec(spec)
    source = Bundle.load(path)
    name = _free_name(there, name, source.manifest.name)
    if filterable is not None:
        filterable = check_filterable(source.labels.display, filterable)
    if priors is not None:
        source = replace(source, priors=_table(priors).read(source, progress=progress))
    tuned = (
        tune_collection(source, spec, there.milvus(), filterable, progress)
        if spec.milvus
        else tune_index(source, spec, device, progress)
    )
    return _write(there, name, source, tuned, spec, filterable, progress, device)


def refresh_priors(
    releases: str | Path,
    priors: PriorTable | str | Path,
    *,
    source: str | None = None,
    name: str | None = None,
    progress: Progress = lambda _: None,
) -> ReleaseManifest:
    """Write a release of the bundle and index of another, by default CURRENT, with the priors of a new table.

    Neither the model nor the index is trained again: every label's row is moved to where it belongs now, and recall is
    measured again. Raises as `build`.
    """
    there = Releases(releases)
    before = there.verify(source or _current(there))
    if before.bundle.priors is None:
        raise PriorsError(f"{before.name}: expected a release that was built with priors, found one without any")
    name = _free_name(there, name, before.manifest.bundle)
    table = _table(priors).read(before.bundle, like=before.bundle.priors, progress=progress)
    bundle = replace(before.bundle, priors=table)
    tuned = _refilled(before, bundle, None, there, progress)
    return _write(there, name, bundle, tuned, before.spec, before.manifest.filterable, progress)


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
    """Write a release of a bundle over the lists of another, where labels came, went or changed; publishes nothing.

    Nothing is clustered: a label whose embedding is what it was stays in its list, others go to the nearest. The exact
    head keeps its labels. Recall is measured again, held to the release's floor, and effort grows where it has to. Of a
    release whose rows Milvus holds, a new collection is written.

    Args:
        bundle: what to index, such as `merge_labels` or a further epoch of training writes it; read and verified.
        releases: directory or URL of releases.
        source: the release whose lists are kept; CURRENT when None.
        name: the new release's name; UTC time and the bundle's name when None.
        priors: a table with the priors of the release, or what to make of one. None: labels keep their values, and new
            ones get each prior's `missing`.
        log: label changes that were merged into the bundle, as `merge_labels` takes them, in place of a table: labels
            get the priors that they came with.
        progress: called with what is being done, one line at a time.

    Raises:
        LongtailIndexError, BundleError, OSError: as `build`, or rows of another width.
        StoreError: as `merge_labels`.

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
    name = _free_name(there, name, taken.manifest.name)
    if _width(taken) != _width(before.bundle):
        asked, given = (
            "{} dimensions and {} more coordinates".format(*_width(each)) for each in (before.bundle, taken)
        )
        raise LongtailIndexError(
            f"update: expected embeddings of {asked}, for λ, μ and label biases, as {before.name} has them, received "
            f"{given}: build a release of their own"
        )
    if before.manifest.filterable is not None:
        check_filterable(taken.labels.display, before.manifest.filterable)
    changes = Changes.between(before.bundle, taken)
    taken = replace(taken, priors=_priors_after(before, taken, changes, priors, log, progress))
    progress(
        f"lists of {before.name}: {changes.added:,} labels added, {changes.moved:,} embedded anew, "
        f"{changes.removed:,} removed"
    )
    tuned = _refilled(before, taken, changes, there, progress)
    return _write(there, name, taken, tuned, before.spec, before.manifest.filterable, progress)


def _table(priors: PriorTable | str | Path) -> PriorTable:
    return priors if isinstance(priors, PriorTable) else PriorTable(as_place(priors))


def _width(bundle: Bundle) -> tuple[int, int]:
    """Coordinates of a row without priors: of the embedding, and beside it."""
    return bundle.embeddings.shape[1], replace(bundle, priors=None).augmentation.extra_dims


def _refilled(
    before: Release, bundle: Bundle, changes: Changes | None, there: Releases, progress: Progress
) -> TunedIndex:
    """The index of a release over the labels of a bundle; Milvus trains lists of its own."""
    spec, searcher, kept = before.spec, before.searcher, before.manifest.partition
    if isinstance(searcher, CollectionSearcher):
        return tune_collection(bundle, spec, there.milvus(), before.manifest.filterable, progress)
    trained = imbalance_of(searcher.index)
    tuned = refill_index(bundle, spec, searcher.index, before.manifest.effort, progress, changes)
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
    """The priors of a release for another bundle's labels."""
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
        return _table(table).read(bundle, like=had, progress=progress)
    given = [came[id_].priors if id_ in came else {} for id_ in bundle.labels.ids.to_pylist()]
    return Priors(had.settings, had.of_added(changes.before_L, given))


def _write(
    there: Releases,
    name: str,
    bundle: Bundle,
    tuned: TunedIndex,
    spec: IndexSpec,
    filterable: Sequence[str] | None,
    progress: Progress,
    device: Device = "cpu",
) -> ReleaseManifest:
    """Write a bundle and its index as a release, whole or not at all, and upload it where releases are at a URL."""
    progress(f"write {name} to {there}")
    with there.collections.held(name, tuned.collection), atomic_directory(there.root / name) as working:
        _link_bundle(path_of(bundle), bundle, working / BUNDLE)
        files = write_index(working, tuned.index, bundle.priors)
        manifest = ReleaseManifest(
            name=name,
            created_at=datetime.now(UTC),
            bundle=bundle.manifest.name,
            bundle_sha256=sha256_of(working / BUNDLE_MANIFEST),
            spec=spec.text,
            labels=len(bundle.embeddings),
            priors=[] if bundle.priors is None else list(bundle.priors.settings),
            factory=None if tuned.index is None else tuned.index.factory,
            head=tuned.chosen.head,
            effort=tuned.chosen.effort,
            recall_floor=spec.recall_floor,
            bytes_per_label_limit=spec.bytes_per_label,
            device=device,
            build_seconds=round(tuned.seconds, 2),
            faiss=faiss.__version__,
            filterable=None if filterable is None else list(filterable),
            files=files,
            **{name: getattr(tuned, name) for name in _MEASURED},
        ).sealed()
        (working / RELEASE_MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
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
    for name in (MANIFEST, MANIFEST_SHA256, *bundle.manifest.files):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        file = (source / name).resolve()
        try:
            os.link(file, target / name)
        except FileNotFoundError as error:
            raise LongtailIndexError(
                f"{source}: expected the bundle to stay until it is linked, found it deleted, as by prune: run again"
            ) from error
        except OSError:
            shutil.copyfile(file, target / name)


def _current(there: Releases) -> str:
    name = there.current()
    if name is None:
        raise ReleaseNotFoundError(f"{there}: expected a published release, or --from NAME, found nothing published")
    return name


def _free_name(there: Releases, name: str | None, bundle_name: str) -> str:
    """Check that a name is free; None: make one of UTC time and the bundle's name, with a number where that exists."""
    if name is None:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", bundle_name)[:64]
        name = base = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{plain}"
        again = 1
        while (there.root / name).exists():
            again += 1
            name = f"{base}-{again}"
    there.shelf.refuse_existing(check_name(name))
    return name
