"""Write a release: a bundle and its index in one directory, whole or not at all; building.py shows its files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from longtail.bundle import Bundle, atomic_directory, sha256_of
from longtail.bundle.remote import local_bundle
from longtail.index.construct.spec import IndexSpec
from longtail.index.construct.tuning import TunedIndex
from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import Device, ReleaseManifest
from longtail.index.release.index_files import manifest_bytes, write_file, write_index
from longtail.index.release.release import BUNDLE, BUNDLE_MANIFEST, RELEASE_MANIFEST


def write_release(
    releases: Path,
    name: str,
    created_at: datetime,
    bundle: Bundle,
    tuned: TunedIndex,
    *,
    spec: IndexSpec,
    device: Device,
    filterable: Sequence[str] | None = None,
) -> ReleaseManifest:
    """Write a bundle and its index to `releases/name`, whole or not at all.

    Raises:
        BundleError: there is such a release.
        LongtailIndexError: an index that cannot be written, or a bundle without a path.
        OSError: the disk is full or not writable; nothing is left behind.
    """
    with atomic_directory(releases / name) as working:
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
    return manifest


def path_of(bundle: Bundle | str | Path) -> Path:
    """The directory of a bundle; raises LongtailIndexError for one without a path."""
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
