"""Check that a release accepts the requests that clients send to the published release.

If a release does not know a query feature, or expects another type of value, every request with that feature gets a 422
while /readyz reports ready.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from longtail.bundle import Feature, Manifest
from longtail.bundle.histories import REMEMBERED

_JSON_TYPES = {
    "id": {"string", "number", "boolean"},
    "history": {"list of ids"},
    "bag": {"list of ids", "object"},
    "text": {"string", "number", "boolean"},
    "number": {"number", "boolean"},
}
"""JSON types that a request may give for a feature, by `Feature.kind`. Kinds that are not listed are compatible only
with themselves, vectors only with vectors of the same dimension."""
_SHOWN = 5


def losses(features: Sequence[str], labels: Mapping[str, str]) -> list[str]:
    """Describe what clients of a release would lose with another, one sentence each."""
    if not labels:
        return [*features]
    shown = [f"{id_!r} ({why})" for id_, why in list(labels.items())[:_SHOWN]]
    more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
    return [*features, f"{len(labels)} labels added while serving would be dropped: {', '.join(shown)}{more}"]


def refused_features(before: Manifest, after: Manifest) -> list[str]:
    """List query features, and the dial ω, that release `before` accepts and `after` refuses, expected and found."""
    taken = {feature.name: feature for feature in after.query_features}
    refused = []
    for feature in before.query_features:
        found = taken.get(feature.name)
        if found is None:
            refused.append(
                f"query feature {feature.name!r}: expected as in the published release, found none: every request "
                "that has it would be refused"
            )
        elif not _accepted(feature) <= _accepted(found):
            refused.append(
                f"query feature {feature.name!r}: expected {feature.expects}, as in the published release, found "
                f"{found.expects}"
            )
    if (name := _query_id(before)) is not None and name not in taken and name != _query_id(after):
        refused.append(
            f"query id {name!r}: expected as in the published release, found none: every request that has it among "
            "its features would be refused"
        )
    if before.cooccurrence is not None and after.cooccurrence is None:
        refused.append(
            "cooccurrence: expected as in the published release, found none: every request that weighs it would be "
            "refused"
        )
    return refused


def _query_id(manifest: Manifest) -> str | None:
    """Get the name in a request's features by which a release remembers queries."""
    together = manifest.cooccurrence
    return None if together is None or REMEMBERED not in manifest.files else together.log.query_id


def refused_priors(before: Collection[str], after: Collection[str]) -> list[str]:
    """List priors whose weights release `before` accepts and `after` refuses, expected and found."""
    return [
        f"prior {name!r}: expected as in the published release, found none: every request that weighs it would be "
        "refused"
        for name in before
        if name not in after
    ]


def refused_queries(before: int, after: int) -> list[str]:
    """Describe the loss of an index of known queries, by the numbers of its rows."""
    if after or not before:
        return []
    return [
        "queries: expected an index of queries as in the published release, found none: /v1/queries would answer 404"
    ]


def _accepted(feature: Feature) -> set[str]:
    taken = _JSON_TYPES.get(feature.kind, {feature.expects})
    if feature.separator is not None:
        taken = taken | {f"string with {feature.separator!r}"}
    return taken
