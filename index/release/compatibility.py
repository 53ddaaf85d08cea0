"""Whether a release takes what clients send to the published one, and keeps the labels that were added to it.

A query feature that a release does not know, or of which it expects another type of value, makes every request that has
it a 422 while /readyz says ready. A label that was added while serving is in the service's state alone; a release that
does not have it and cannot embed it drops it from every answer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longtail.bundle import (
    Bundle,
    BundleError,
    Feature,
    Manifest,
    Upsert,
    read_manifest,
)
from longtail.bundle.added_labels import LabelAdder
from longtail.index.errors import IncompatibleReleaseError
from longtail.state import Place, StoreError, read_label_changes

_JSON_TYPES = {
    "id": {"string", "integer"},
    "history": {"list of ids"},
    "bag": {"list of ids", "object"},
    "text": {"string"},
    "number": {"integer", "fraction"},
}
"""Values that a request may give for a feature, by `Feature.kind`; of other kinds, values like no other's, and of a
vector like none of other dims."""
_SHOWN = 5


@dataclass(frozen=True)
class Compatibility:
    """What clients of the published release would lose by another.

    Attributes:
        before: the published release's name.
        after: the other's.
        features: query features and priors that it would refuse, expected and found, one sentence each.
        labels: labels added while serving that it would drop, and why, by id.
        unread: why it cannot be told which labels were added; None if it can.
    """

    before: str
    after: str
    features: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    unread: str | None = None

    def lines(self) -> list[str]:
        """What would be lost, one sentence each; of many labels the first."""
        lines = [*self.features]
        if self.labels:
            shown = [f"{id_!r} ({why})" for id_, why in list(self.labels.items())[:_SHOWN]]
            more = f" and {len(self.labels) - _SHOWN} more" if len(self.labels) > _SHOWN else ""
            lines.append(f"{len(self.labels)} labels added while serving would be dropped: {', '.join(shown)}{more}")
        return lines + ([] if self.unread is None else [self.unread])

    def check(self) -> None:
        """Refuse a release that takes something away.

        Raises:
            IncompatibleReleaseError: lists it.
        """
        if lines := self.lines():
            raise IncompatibleReleaseError(
                f"{self.after} would not do for clients of {self.before}: {'; '.join(lines)}; CURRENT stays as it was, "
                "and --force publishes all the same",
                features=self.features,
                labels=self.labels,
            )


def refused_features(before: Manifest, after: Manifest) -> list[str]:
    """Query features that requests to one release may have and another refuses, expected and found."""
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
    return refused


def refused_priors(before: Collection[str], after: Collection[str]) -> list[str]:
    """Priors whose weights requests to one release may give and another refuses, by name, expected and found."""
    return [
        f"prior {name!r}: expected as in the published release, found none: every request that weighs it would be "
        "refused"
        for name in before
        if name not in after
    ]


def dropped_labels(before: Path, after: Bundle, upserts: Sequence[Upsert]) -> dict[str, str]:
    """Added labels that one release answers and another would not, and why not, by id.

    Args:
        before: bundle of the published release, which is read only if there is such a label.
        after: bundle of the other.
        upserts: labels that were added or embedded anew.

    Raises:
        BundleError: a bundle that is not intact, or a label tower that does not run.
    """
    known = set(after.labels.ids.to_pylist())
    missing = [record for record in upserts if record.id not in known]
    if not missing:
        return {}
    _, dropped = LabelAdder(after, {}).add(missing)
    if dropped:
        published = Bundle.load(before)
        rows = {id_: row for row, id_ in enumerate(published.labels.ids.to_pylist())}
        lost = [record for record in missing if record.id in dropped and record.id not in rows]
        _, never_served = LabelAdder(published, rows).add(lost)
        dropped = {id_: why for id_, why in dropped.items() if id_ not in never_served}
    return dropped


def compare_releases(
    before: tuple[str, Path], after: tuple[str, Bundle], state: Place, priors: tuple[Collection[str], Collection[str]]
) -> Compatibility:
    """Compare two releases under the label changes of a service.

    Args:
        before: name of the published release, and the directory of its bundle.
        after: name and bundle of the one to publish.
        state: of the service; there may be no changes.
        priors: names of those of both releases.

    Raises:
        BundleError: the published release cannot be read.
    """
    features = refused_features(read_manifest(before[1]), after[1].manifest) + refused_priors(*priors)
    labels: dict[str, str] = {}
    unread = None
    try:
        labels = dropped_labels(before[1], after[1], list(read_label_changes(state).upserts.values()))
    except FileNotFoundError:
        pass
    except (BundleError, StoreError, OSError) as error:
        unread = f"labels added while serving cannot be compared: {error}"
    return Compatibility(before[0], after[0], features, labels, unread)


def _accepted(feature: Feature) -> set[str]:
    if feature.of_label is not None:
        return _JSON_TYPES["id"] | {feature.model_copy(update={"of_label": None}).expects}
    taken = _JSON_TYPES.get(feature.kind, {feature.expects})
    return taken if feature.times is None else taken | {f"times: {feature.times}"}
