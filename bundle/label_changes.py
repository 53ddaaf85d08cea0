"""Define changes of labels since a bundle was trained; `longtail.state` stores them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter
from rpds import HashTrieMap

from longtail.bundle.one_line import one_line


class _Change(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    at: AwareDatetime
    """Time of the change, UTC; always later than the preceding change, even if the clock ran backwards
    (`longtail.state.LabelStore.append`)."""


class Upsert(_Change):
    """Adds a label, or embeds a known label again; the label is no longer hidden."""

    op: Literal["upsert"] = "upsert"
    features: dict[str, JsonValue] | None
    """Inputs of the label tower by name. None: a label of the release keeps its embedding."""
    display: dict[str, JsonValue] = {}
    priors: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Values of the release's priors, by name; for absent ones see `Priors.added_values`."""


class Hide(_Change):
    """Deletes an added label, or hides a label of the release."""

    op: Literal["hide"] = "hide"


class Restore(_Change):
    """Restores a hidden label."""

    op: Literal["restore"] = "restore"


class Patch(_Change):
    """Changes columns of a label; other columns, the embedding and the state stay."""

    op: Literal["patch"] = "patch"
    display: dict[str, JsonValue]


LabelRecord = Upsert | Hide | Restore | Patch
_RECORD: TypeAdapter[LabelRecord] = TypeAdapter(Annotated[LabelRecord, Field(discriminator="op")])


@dataclass(frozen=True)
class LabelChanges:
    """The effect of a sequence of records, by label id; a label's last record counts.

    The maps share memory with earlier ones, so that a change of one label costs one label.

    Attributes:
        patches: columns changed since the label's upsert, or since the release; also of hidden labels.
    """

    upserts: HashTrieMap[str, Upsert] = field(default_factory=HashTrieMap)
    hidden: HashTrieMap[str, Hide] = field(default_factory=HashTrieMap)
    patches: HashTrieMap[str, tuple[Patch, ...]] = field(default_factory=HashTrieMap)

    __repr__ = one_line

    def apply(self, records: Iterable[LabelRecord]) -> LabelChanges:
        """Return the changes after further records."""
        upserts, hidden, patches = self.upserts, self.hidden, self.patches
        for record in records:
            if isinstance(record, Patch):
                patches = patches.insert(record.id, _in_effect((*patches.get(record.id, ()), record)))
                continue
            hidden = hidden.discard(record.id)
            if isinstance(record, Upsert):
                upserts = upserts.insert(record.id, record)
                patches = patches.discard(record.id)
            elif isinstance(record, Hide):
                upserts = upserts.discard(record.id)
                hidden = hidden.insert(record.id, record)
        return LabelChanges(upserts, hidden, patches)

    def records(self) -> list[Upsert | Patch | Hide]:
        """Return the shortest sequence of records with the same effect: upserts, patches and hides by time and id."""
        several: list[Iterable[Upsert | Patch | Hide]] = [
            self.upserts.values(), chain.from_iterable(self.patches.values()), self.hidden.values()
        ]  # fmt: skip
        return [change for records in several for change in sorted(records, key=lambda record: (record.at, record.id))]


def _in_effect(patches: Sequence[Patch]) -> tuple[Patch, ...]:
    """Drop patches whose columns were all changed by later patches."""
    later_columns, effective = set[str](), list[Patch]()
    for patch in reversed(patches):
        if not patch.display.keys() <= later_columns:
            effective.append(patch)
            later_columns |= patch.display.keys()
    return tuple(reversed(effective))


def needed_positions(records: Sequence[LabelRecord]) -> list[int]:
    """Return the positions of records that any reader still needs.

    These are a label's patches since its last upsert; its last upsert, unless the label was hidden later and never
    patched; its last hide, unless an upsert followed; and its last restore, unless an upsert or a hide followed.
    """
    last, patches, patched = dict[tuple[str, str], int](), dict[str, tuple[Patch, ...]](), set[str]()
    position_of = {id(record): i for i, record in enumerate(records)}
    for i, record in enumerate(records):
        if isinstance(record, Patch):
            patches[record.id] = _in_effect((*patches.get(record.id, ()), record))
            patched.add(record.id)
            continue
        last[record.id, record.op] = i
        if isinstance(record, Upsert):
            patches.pop(record.id, None)
            last.pop((record.id, "hide"), None)
        elif isinstance(record, Hide) and record.id not in patched:
            last.pop((record.id, "upsert"), None)
        if not isinstance(record, Restore):
            last.pop((record.id, "restore"), None)
    return sorted({*last.values(), *(position_of[id(patch)] for group in patches.values() for patch in group)})


def replay(records: Iterable[LabelRecord]) -> LabelChanges:
    """Compute the effect of all records, from the first on."""
    return LabelChanges().apply(records)


def record_json(record: LabelRecord) -> str:
    """Encode a record as JSON for `read_record`."""
    content = record.model_dump_json()
    # A record that cannot be read back would stop every later start of the service.
    if _RECORD.validate_json(content) != record:
        raise ValueError("it reads back as something else")
    return content


def read_record(content: str | bytes) -> LabelRecord:
    """Decode a record of `record_json`; raises pydantic's ValidationError."""
    return _RECORD.validate_json(content)
