"""Write a release: a bundle and its measured index, in one directory.

NAME/
  bundle/         every file of the bundle, hard-linked where the file system allows it
  index/          index.faiss, whose ids are label rows; lists.npy, the inverted list of every row;
                  priors.npy, the priors of every label
  queries/        the index of known queries, if there are any: a release whose rows are queries
  release.json    the bundle, the index, its measurements, and the sha256 of every file of index/ and queries/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import faiss

from longtail.bundle import Bundle
from longtail.bundle.integrity import record_files
from longtail.bundle.registry import RegisteredVersion
from longtail.bundle.remote import MANIFESTS
from longtail.bundle.store import atomic_directory, file_sha256, link_or_copy, working_directory
from longtail.index.building.milvus import tune_collection
from longtail.index.building.tuning import TunedIndex, tune_index
from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import ReleaseManifest
from longtail.index.recall import Progress
from longtail.index.release.index_files import FAISS_FILE, INDEX, write_index
from longtail.index.release.release import BUNDLE, BUNDLE_MANIFEST, QUERIES, RELEASE_MANIFEST, Release, check_name
from longtail.index.release.releases import Releases, open_releases
from longtail.index.search.faiss_index import FaissIndex
from longtail.index.spec import IndexSpec

_MEASURED = (
    *("kind", "dim", "collection", "params_at", "recall_k", "recall_queries", "kinds", "recall"),
    *("trials", "filtered"),
)
"""Fields of `ReleaseManifest` that are copied from `TunedIndex`."""


@dataclass(frozen=True)
class ReleaseWriter:
    """Build and write one release, completely or not at all.

    Args:
        filterable: the only display columns that requests may filter by; None: the service decides.
        registered: the version of the bundle in MLflow's registry.
    """

    releases: Releases
    name: str
    spec: IndexSpec
    progress: Progress
    filterable: Sequence[str] | None = None
    registered: RegisteredVersion | None = None

    def build(
        self,
        bundle: Bundle,
        like: FaissIndex | None = None,
        queries: Bundle | None = None,
        queries_like: FaissIndex | None = None,
    ) -> ReleaseManifest:
        """Index a bundle that was written or loaded, and write the release.

        Where the releases are at a URL, the release is uploaded afterwards.

        Args:
            like: an earlier index whose kind and lists the index takes over.
            queries: the bundle of an index of queries; the index is exact if the spec is `flat`, otherwise `auto`.
            queries_like: an earlier index of queries whose lists it takes over.
        """
        _ = bundle.labels.lifetimes  # refuses wrong ones before the work
        if self.spec.text.startswith("milvus"):
            server = self.releases.milvus()
            tuned = tune_collection(bundle, self.spec, server, self.filterable, self.progress)
        else:
            tuned = tune_index(bundle, self.spec, self.progress, like)
        return self._write(bundle, tuned, queries, queries_like)

    def link(self, before: Release, bundle: Bundle) -> ReleaseManifest:
        """Write a release of a bundle with an earlier release's rows, and link its index."""
        self.progress(f"write {self.name} to {self.releases}")
        with atomic_directory(self.releases.root / self.name) as working:
            # Links take no space, and the release keeps its files when the bundle is deleted.
            _link(bundle.path, working / BUNDLE, (*MANIFESTS, *bundle.manifest.files))
            _link(before.path, working, before.manifest.files)
            update = {
                "name": self.name,
                "created_at": datetime.now(UTC),
                "bundle_sha256": file_sha256(working / BUNDLE_MANIFEST),
            }
            manifest = _write_manifest(working, before.manifest.model_copy(update=update))
        self.releases.complete(self.name)
        return manifest

    def _write(
        self, bundle: Bundle, tuned: TunedIndex, queries: Bundle | None, queries_like: FaissIndex | None
    ) -> ReleaseManifest:
        self.progress(f"write {self.name} to {self.releases}")
        collection = tuned.collection
        # The collection is held first: a prune that runs between these steps must not drop it.
        with (
            nullcontext() if collection is None else self.releases.collections().holding(self.name, collection),
            atomic_directory(self.releases.root / self.name) as working,
        ):
            _link(bundle.path, working / BUNDLE, (*MANIFESTS, *bundle.manifest.files))
            write_index(working, tuned.index, bundle.priors)
            if queries is not None:
                self._write_queries(working, queries, queries_like)
            labels = len(bundle.embeddings)
            files = record_files(working, working / INDEX) | record_files(working, working / QUERIES)
            manifest = _write_manifest(
                working,
                ReleaseManifest(
                    name=self.name,
                    created_at=datetime.now(UTC),
                    bundle=bundle.manifest.name,
                    bundle_sha256=file_sha256(working / BUNDLE_MANIFEST),
                    registered=self.registered,
                    spec=self.spec.text,
                    labels=labels,
                    priors=list(bundle.priors.settings),
                    factory=None if tuned.index is None else tuned.index.factory,
                    head_lists=0 if tuned.index is None else tuned.index.head_lists,
                    params=tuned.chosen.params,
                    recall_floor=self.spec.recall_floor,
                    bytes_per_label=None if tuned.index is None else round(files[FAISS_FILE].bytes / labels, 2),
                    device=self.spec.device,
                    build_seconds=round(tuned.seconds, 2),
                    faiss=faiss.__version__,
                    queries=0 if queries is None else len(queries.embeddings),
                    filterable=None if self.filterable is None else list(self.filterable),
                    files=files,
                    **{name: getattr(tuned, name) for name in _MEASURED},
                ),
            )
        self.releases.complete(self.name)
        return manifest

    def _write_queries(self, working: Path, queries: Bundle, like: FaissIndex | None) -> None:
        """Write an index of queries as a release inside a release."""
        spec = IndexSpec("flat" if self.spec.text == "flat" else "auto", self.spec.recall_floor)
        tuned = tune_index(queries, spec, lambda line: self.progress(f"index of queries: {line}"), like)
        lowest = tuned.chosen.lowest.recall
        self.progress(
            f"queries: {tuned.kind} over {len(queries.embeddings):,}, recall@{tuned.recall_k} {lowest:.3f} or more"
        )
        with working_directory(working / f"{QUERIES}.bundle") as folder:
            written = replace(queries.write(folder / BUNDLE), priors=queries.priors)
            ReleaseWriter(open_releases(working), QUERIES, spec, lambda _: None)._write(written, tuned, None, None)


def free_name(releases: Releases, name: str | None, bundle_name: str) -> str:
    """Check that a name is free; None: create one from UTC time and the bundle's name.

    A number is appended if the created name exists.
    """
    if name is None:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", bundle_name)[:64]
        name = base = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{plain}"
        number = 1
        while (releases.root / name).exists():
            number += 1
            name = f"{base}-{number}"
    releases.refuse_existing(check_name(name))
    return name


def _write_manifest(working: Path, manifest: ReleaseManifest) -> ReleaseManifest:
    sealed = manifest.sealed()
    (working / RELEASE_MANIFEST).write_text(sealed.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return sealed


def _link(source: Path | None, target: Path, names: Iterable[str]) -> None:
    """Hard-link files of a directory, or copy them where the file system cannot link."""
    assert source is not None
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            link_or_copy(source / name, target / name)
        except FileNotFoundError as error:
            raise LongtailIndexError(
                f"{source}: {name} was deleted while its release was written, perhaps by prune; run again"
            ) from error
