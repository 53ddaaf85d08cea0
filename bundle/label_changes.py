"""Labels that were added, hidden or brought back since a bundle was trained. `longtail.state` keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter


class _Change(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    at: AwareDatetime
    """When it was asked for, UTC; later than what it follows, whatever the clock said
    (`longtail.state.LabelStore.append`)."""


class Upsert(_Change):
    """A label is added, or a known one embedded again; it is no longer hidden."""

    op: Literal["upsert"] = "upsert"
    features: dict[str, JsonValue] | None
    """By name, as the label tower takes them. None: the label is of the release, and keeps its embedding."""
    display: dict[str, JsonValue] = {}
    priors: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Its numbers, by the release's priors; of those left out, what `Priors.of_added` says."""


class Hide(_Change):
    """An added label is deleted, any other hidden, in this release and in those to come."""

    op: Literal["hide"] = "hide"


class Restore(_Change):
    """A hidden label is no longer hidden."""

    op: Literal["restore"] = "restore"


class Patch(_Change):
    """Change columns of a label; the others, its embedding and its state stay."""

    op: Literal["patch"] = "patch"
    display: dict[str, JsonValue]


LabelRecord = Upsert | Hide | Restore | Patch
_RECORD: TypeAdapter[LabelRecord] = TypeAdapter(Annotated[LabelRecord, Field(discriminator="op")])


@dataclass(frozen=True)
class LabelChanges:
    """What a sequence of records amounts to, by id; of several about one label the last counts.

    Attributes:
        patches: columns changed since the label's upsert, or of the release; those of hidden labels stay.
    """

    upserts: dict[str, Upsert] = field(default_factory=dict)
    hidden: dict[str, Hide] = field(default_factory=dict)
    patches: dict[str, tuple[Patch, ...]] = field(default_factory=dict)

    def after(self, records: Iterable[LabelRecord]) -> LabelChanges:
        """These changes and then some more."""
        upserts, hidden, patches = self.upserts.copy(), self.hidden.copy(), self.patches.copy()
        for record in records:
            if isinstance(record, Patch):
                patches[record.id] = _in_effect((*patches.get(record.id, ()), record))
                continue
            hidden.pop(record.id, None)
            if isinstance(record, Upsert):
                upserts[record.id] = record
                patches.pop(record.id, None)
            elif isinstance(record, Hide):
                upserts.pop(record.id, None)
                hidden[record.id] = record
        return LabelChanges(upserts, hidden, patches)

    def records(self) -> list[Upsert | Patch | Hide]:
        """The shortest sequence that amounts to this."""
        return [*self.upserts.values(), *chain.from_iterable(self.patches.values()), *self.hidden.values()]


def _in_effect(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Leave out patches whose columns later ones have all changed."""
    seen, kept = set[str](), list[Patch]()
    for patch in reversed(patches):
        if not patch.display.keys() <= seen:
            kept.append(patch)
            seen |= patch.display.keys()
    return tuple(reversed(kept))


def needed(records: Sequence[LabelRecord]) -> list[int]:
    """Return the places of records without which a reader anywhere in the sequence would end elsewhere.

    Needed are a label's patches since its last upsert. Its last upsert is, unless the label was hidden later and never
    patched; its last hide, unless an upsert followed; its last restore, unless an upsert or a hide followed.
    """
    last, patches, patched = dict[tuple[str, str], int](), dict[str, tuple[Patch, ...]](), set[str]()
    place_of = {id(record): place for place, record in enumerate(records)}
    for place, record in enumerate(records):
        if isinstance(record, Patch):
            patches[record.id] = _in_effect((*patches.get(record.id, ()), record))
            patched.add(record.id)
            continue
        last[record.id, record.op] = place
        if isinstance(record, Upsert):
            patches.pop(record.id, None)
            last.pop((record.id, "hide"), None)
        elif isinstance(record, Hide) and record.id not in patched:
            last.pop((record.id, "upsert"), None)
        if not isinstance(record, Restore):
            last.pop((record.id, "restore"), None)
    return sorted({*last.values(), *(place_of[id(patch)] for each in patches.values() for patch in each)})


def replay(records: Iterable[LabelRecord]) -> LabelChanges:
    """What all the records, from the first on, amount to."""
    return LabelChanges().after(records)


def record_json(record: LabelRecord) -> str:
    """The record as JSON that reads back as the record."""
    content = record.model_dump_json()
    if _RECORD.validate_json(content) != record:
        raise ValueError("it reads back as something else")
    return content


def read_record(content: str | bytes) -> LabelRecord:
    """The record that `record_json` wrote; raises pydantic's ValidationError where it is none."""
    return _RECORD.validate_json(content)
