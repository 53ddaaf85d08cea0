"""Labels that were added, hidden or brought back since a bundle was trained. `longtail.state` keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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
    """Columns of a label change; the others, its embedding and its state stay."""

    op: Literal["patch"] = "patch"
    display: dict[str, JsonValue]


LabelRecord = Upsert | Hide | Restore | Patch
_RECORD: TypeAdapter[LabelRecord] = TypeAdapter(Annotated[LabelRecord, Field(discriminator="op")])


@dataclass(frozen=True)
class LabelChanges:
    """What a sequence of records amounts to, by id; of several about one label the last counts.

    Attributes:
        patched: labels of the release that are hidden, with the columns that they come back with.
    """

    upserts: dict[str, Upsert] = field(default_factory=dict)
    hidden: dict[str, Hide] = field(default_factory=dict)
    patched: dict[str, Upsert] = field(default_factory=dict)

    def after(self, records: Iterable[LabelRecord]) -> LabelChanges:
        """These changes and then some more."""
        upserts, hidden, patched = self.upserts.copy(), self.hidden.copy(), self.patched.copy()
        for record in records:
            if isinstance(record, Patch):
                if record.id not in hidden:  # of two at once, the one that hides came first
                    upserts[record.id] = _with(upserts.get(record.id), record)
                continue
            hidden.pop(record.id, None)
            before = patched.pop(record.id, None)
            if isinstance(record, Upsert):
                upserts[record.id] = record
            elif isinstance(record, Hide):
                before = upserts.pop(record.id, before)
                if before is not None and before.features is None:
                    patched[record.id] = before
                hidden[record.id] = record
            elif before is not None:
                upserts[record.id] = before
        return LabelChanges(upserts, hidden, patched)

    def records(self) -> list[Upsert | Hide]:
        """The shortest sequence that amounts to this."""
        return [*self.upserts.values(), *self.patched.values(), *self.hidden.values()]


def _with(before: Upsert | None, patch: Patch) -> Upsert:
    """Change columns of a label; without a change before, it is one of the release."""
    if before is None:
        return Upsert(id=patch.id, at=patch.at, features=None, display=patch.display)
    return before.model_copy(update={"at": patch.at, "display": before.display | patch.display})


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
