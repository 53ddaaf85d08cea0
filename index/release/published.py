"""What is published now, for what is to be published to be held against; none that cannot be read holds up the next."""

from __future__ import annotations

from longtail.bundle import Bundle, BundleError
from longtail.bundle.errors import StorageError
from longtail.index.errors import (
    LongtailIndexError,
    ReleaseCorruptError,
    ReleaseNotFoundError,
    ReleaseVersionError,
)
from longtail.index.release.bucket_floors import BucketMetrics
from longtail.index.release.compatibility import Compatibility, compare_releases
from longtail.index.release.local import LocalReleases
from longtail.index.release.release import BUNDLE, read_bundle_manifest, read_prior_names
from longtail.index.release.remote import RemoteReleases
from longtail.state import Place


def metrics_of(
    shelf: LocalReleases | RemoteReleases, current: str | None, metric: str, *, force: bool
) -> BucketMetrics | None:
    """CURRENT's figures; None where there is no such release that can be read.

    Args:
        shelf: has it.
        current: its name.
        metric: as of `BucketMetrics.at_default`.
        force: whether a store that does not answer holds up nothing, either.

    Raises:
        StorageError: the store does not answer.
    """
    if current is None:
        return None
    try:
        with shelf.manifests(current) as path:
            return BucketMetrics.at_default(current, read_bundle_manifest(path), metric)
    except (BundleError, LongtailIndexError):
        return None
    except StorageError:
        if force:
            return None
        raise


def compared_with(
    shelf: LocalReleases | RemoteReleases, current: str | None, name: str, bundle: Bundle, state: Place | None
) -> Compatibility | None:
    """What clients of CURRENT would lose by a release; None where there is no other that can be read.

    Args:
        shelf: has both.
        current: CURRENT's name.
        name: the other's.
        bundle: the other's.
        state: the service's, for the labels added to it; None: the directory `.state` beside the releases.

    Raises:
        StorageError: the store does not answer.
    """
    if current is None or current == name:
        return None
    try:
        before, after = shelf.fetch(current), shelf.fetch(name)
        priors = read_prior_names(before), read_prior_names(after)
        return compare_releases((current, before / BUNDLE), (name, bundle), state or shelf.directory / ".state", priors)
    except (BundleError, ReleaseCorruptError, ReleaseVersionError, ReleaseNotFoundError):
        return None
