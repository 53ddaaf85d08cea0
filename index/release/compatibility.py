"""Check that a release accepts the requests that clients send to the published release.

If a release does not know a query feature, or expects another type of value, every request with that feature gets a 422
while /readyz reports ready.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from longtail.bundle import Feature, Manifest
from longtail.bundle.histories import REMEMBERED
from longtail.index.manifests import ReleaseManifest

_JSON_TYPES = {
    "id": {"string", "number", "boolean"},
    "history": {"list of ids"},
    "bag": {"list of ids", "object"},
    "text": {"string", "number", "boolean"},
    "number": {"number", "boolean"},
}
"""JSON types that a request may give for a feature, by `Feature.kind`. Kinds that are not listed are compatible only
with themselves, vectors only with vectors of the same dimension."""
_LISTED = 5


class ClientInputs(NamedTuple):
    """What clients of a release may send.

    Attributes:
        manifest: the bundle's manifest, with the query features.
        priors: names of the priors that requests may weigh.
        has_queries: whether /v1/queries answers.
    """

    manifest: Manifest
    priors: Collection[str] = ()
    has_queries: bool = False

    @classmethod
    def from_manifests(cls, bundle: Manifest, release: ReleaseManifest) -> ClientInputs:
        """Read the inputs from a release's manifests."""
        return cls(bundle, [prior.name for prior in release.priors], release.queries > 0)

    @property
    def query_id(self) -> str | None:
        """Name in a request's features by which a release remembers queries."""
        term = self.manifest.cooccurrence
        return None if term is None or REMEMBERED not in self.manifest.files else term.log.query_id


def breaking_changes(before: ClientInputs, after: ClientInputs, dropped: Mapping[str, str] | None = None) -> list[str]:
    """List inputs that release `before` accepts and `after` refuses, one sentence each.

    Args:
        dropped: labels added while serving that the release would lose, with the reason for each.
    """
    features = {feature.name: feature for feature in after.manifest.query_features}
    changes = []
    for feature in before.manifest.query_features:
        new = features.get(feature.name)
        if new is None:
            changes.append(
                f"query feature {feature.name!r}: expected as in the published release, found none: every request "
                "that has it would be refused"
            )
        # A release may take more types than before: every value that clients send still fits.
        elif not _json_types(feature) <= _json_types(new):
            changes.append(
                f"query feature {feature.name!r}: expected {feature.expects}, as in the published release, found "
                f"{new.expects}"
            )
    if (name := before.query_id) is not None and name not in features and name != after.query_id:
        changes.append(
            f"query id {name!r}: expected as in the published release, found none: every request that has it among "
            "its features would be refused"
        )
    weights = [f"prior {name!r}" for name in before.priors if name not in after.priors]
    if before.manifest.cooccurrence is not None and after.manifest.cooccurrence is None:
        weights.insert(0, "cooccurrence")
    changes += [
        f"{name}: expected as in the published release, found none: every request that weighs it would be refused"
        for name in weights
    ]
    if before.has_queries and not after.has_queries:
        changes.append(
            "queries: expected an index of queries as in the published release, found none: /v1/queries would answer "
            "404"
        )
    if dropped:
        listed = [f"{id_!r} ({reason})" for id_, reason in list(dropped.items())[:_LISTED]]
        more = f" and {len(dropped) - _LISTED} more" if len(dropped) > _LISTED else ""
        changes.append(f"{len(dropped)} labels added while serving would be dropped: {', '.join(listed)}{more}")
    return changes


def _json_types(feature: Feature) -> set[str]:
    types = _JSON_TYPES.get(feature.kind, {feature.expects})
    return types if feature.separator is None else types | {f"string with {feature.separator!r}"}
