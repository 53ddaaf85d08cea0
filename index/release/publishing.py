"""`publish` as one function, for callers who have no directory of releases at hand."""

from __future__ import annotations

from pathlib import Path

from longtail.index.release.bucket_floors import BucketFloors, FloorsReport
from longtail.index.release.releases import Releases
from longtail.state import read_place


def publish(
    releases: str | Path,
    name: str,
    *,
    floors: BucketFloors | None = None,
    force: bool = False,
    state: str | Path | None = None,
) -> FloorsReport:
    """Verify a release and make it the one that serves; `Releases(releases).publish(name)`, which says what it raises.

    Args:
        releases: directory or URL of releases.
        name: name of a release there.
        floors: what its buckets must be given; by default what `promise.toml` beside them says.
        force: publish a release that is below a floor, or takes something away from clients, too.
        state: the service's state directory or database, for the labels added to it; by default `.state` of the
            releases'.

    Returns:
        The floors and how the release stands to them.

    Example:
        >>> from longtail.index import BucketFloors, Releases, build, publish
        >>> manifest = build("runs/model", "releases", name="first")
        >>> publish("releases", "first").unmet
        []
        >>> Releases("releases").current()
        'first'
        >>> publish("releases", "first", floors=BucketFloors(floors={"tail": 0.02}))
        Traceback (most recent call last):
        longtail.index.errors.FloorsNotMetError: first is below its bucket floors, recall@20: expected ...
    """
    return Releases(releases).publish(
        name, floors=floors, force=force, state=None if state is None else read_place(state)
    )
