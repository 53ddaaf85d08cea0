"""Turn labels added after training into rows of a bundle: embeddings by its label tower, count, log ν and bucket.

The service scores these rows in addition to its index, and `longtail-index merge` writes them into a bundle.

Legend: `L` labels of the bundle, `M` added labels, `B` some of them, `D` dimensions, `P` priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from longtail.bundle.arrays import Float32, Int8, Int64
from longtail.bundle.bundle import LABEL_TOWER, UNIT_NORM_TOLERANCE, Bundle
from longtail.bundle.display import DisplayColumns
from longtail.bundle.errors import DisplayError, FeatureError, FixedLabelsError, InputError
from longtail.bundle.features import Features
from longtail.bundle.frequency import NEW
from longtail.bundle.label_changes import LabelChanges, Patch, Upsert
from longtail.bundle.lifetimes import check_lifetime, read_lifetime
from longtail.bundle.priors import unknown_prior
from longtail.bundle.tower import Tower

NEW_LABEL = -1
"""Value in `AddedLabels.catalogue_rows` for a label that the bundle lacks."""
_BATCH = 256
"""Labels embedded in one call of the label tower."""


@dataclass(frozen=True)
class AddedLabels:
    """Labels added to a bundle or embedded again.

    Attributes:
        catalogue_rows: int64 [M], row of the label in the bundle; `NEW_LABEL` (−1) if the bundle lacks it.
        embeddings: float32 [M, D].
        counts: int64 [M], training pairs; 0 for a new label.
        log_pn: float32 [M]; a new label gets the value of the bundle's rarest label, which has the least π.
        log_popularity: float32 [M]; a new label gets the forecast's value, or the rarest label's; None if the bundle
            has no such column.
        buckets: int8 [M]; a new label is in the bucket `new`.
        bias: float32 [M], 0 for a new label; None if the bundle's labels have no bias.
        display: M objects, every display column of a label as JSON values.
        priors: float32 [M, P], values of the release's priors.
        lifetimes: int64 [M, 2], when each label is available; see `Labels.lifetimes`.
    """

    ids: list[str]
    catalogue_rows: Int64
    embeddings: Float32
    counts: Int64
    log_pn: Float32
    log_popularity: Float32 | None
    buckets: Int8
    bias: Float32 | None
    display: list[dict[str, JsonValue]]
    priors: Float32
    lifetimes: Int64 | None = None

    def __len__(self) -> int:
        return len(self.ids)


class LabelAdder:
    """Turns upserts into rows of one bundle. Thread-safe."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._rows = bundle.labels.rows_by_id
        self._display = DisplayColumns(bundle.labels.display)
        self._columns = frozenset(bundle.labels.display.column_names)
        self._rarest = int(bundle.labels.log_pi.argmin())
        self._priors = bundle.priors
        self.data_until = bundle.manifest.data_until

    def supersedes(self, id_: str, at: datetime) -> bool:
        """Return whether a bundle newer than a change already has the label."""
        return id_ in self._rows and at <= self.data_until

    def find_change(self, changes: LabelChanges, id_: str) -> Upsert | None:
        """Return the upsert that a label's changes amount to in this bundle; None if they change nothing.

        It has no features if only columns changed. Columns that the bundle lacks are left out, because a patch may be
        meant for another release.
        """
        if id_ in changes.hidden:
            return None
        upsert = changes.upserts.get(id_)
        if upsert is not None and self.supersedes(id_, upsert.at):
            upsert = None
        newer = [patch for patch in changes.patches.get(id_, ()) if not self.supersedes(id_, patch.at)]
        columns = {name: value for patch in newer for name, value in patch.display.items() if name in self._columns}
        if upsert is not None:
            return upsert.model_copy(update={"display": upsert.display | columns})
        if not columns or id_ not in self._rows:
            return None
        return Upsert(id=id_, at=newer[-1].at, features=None, display=columns)

    def complete(self, changes: LabelChanges, upsert: Upsert) -> Upsert:
        """Complete an upsert with values of earlier changes of its label."""
        before = self.find_change(changes, upsert.id)
        if before is None:
            return upsert
        display = dict[str, JsonValue]()
        for name, value in before.display.items():
            with suppress(DisplayError):
                self._display.complete({name: value}, {})
                display[name] = value
        return upsert.model_copy(update={"display": display | upsert.display, "priors": before.priors | upsert.priors})

    def patch_to_upsert(self, changes: LabelChanges, patch: Patch) -> Upsert:
        """Return the upsert equivalent to a patch, to check it."""
        before = changes.upserts.get(patch.id)
        if before is None or patch.id in self._rows:
            return Upsert(id=patch.id, at=patch.at, features=None, display=patch.display)
        return before.model_copy(update={"display": before.display | patch.display})

    def load(self) -> None:
        """Load the label tower now; raises FixedLabelsError or TowerError."""
        _ = self._tower

    def check(self, records: Sequence[Upsert]) -> None:
        """Refuse records that `add` could not add; raises InputError, FixedLabelsError or TowerError."""
        self._require_tower(records)
        row, names = 0, [prior.name for prior in self._priors.from_table]
        try:
            for i, record in enumerate(records):
                row = i
                display = self._display_values(record)
                check_lifetime(display)
                if unknown := [name for name in record.priors if name not in names]:
                    raise unknown_prior(names, unknown[0])
                self._priors.check(record.priors, display)
            for row in range(0, len(records), _BATCH):
                self._embed(records[row : row + _BATCH])
        except InputError as error:
            raise type(error)(error.message, row=row + error.row, field=error.field) from None

    def add(self, records: Sequence[Upsert]) -> tuple[AddedLabels, dict[str, str]]:
        """Embed records that fit the bundle; returns rows, and reasons for skipped ones by id.

        Priors that the bundle lacks are ignored, because a record may be meant for another release. Raises TowerError.
        """
        refused: dict[str, str] = {}
        try:
            self._require_tower(records)
        except FixedLabelsError as error:  # still fine for labels that keep their embedding, which need no tower
            fixed = self._bundle.proposal is not None
            refused = {record.id: str(error) for record in records if fixed or record.features is not None}
            records = [record for record in records if record.id not in refused]
        added: list[Upsert] = []
        embeddings: list[Float32] = []
        display: list[dict[str, JsonValue]] = []

        def one_by_one(batch: Sequence[Upsert]) -> None:
            try:
                columns = [self._display_values(record) for record in batch]
                for record, values in zip(batch, columns, strict=True):
                    self._priors.check(record.priors, values)
                embedded = self._embed(batch)
            except InputError as error:
                if len(batch) == 1:
                    refused[batch[0].id] = f"{error.field}: {error.message}"
                    return
                for record in batch:
                    one_by_one([record])
                return
            embeddings.append(embedded)
            added.extend(batch)
            display.extend(columns)

        for start in range(0, len(records), _BATCH):
            one_by_one(records[start : start + _BATCH])
        return self._additions(added, embeddings, display), refused

    def _additions(
        self,
        records: Sequence[Upsert],
        embeddings: Sequence[Float32],
        display: list[dict[str, JsonValue]],
    ) -> AddedLabels:
        labels = self._bundle.labels
        rows_M = np.array([self._rows.get(record.id, NEW_LABEL) for record in records], np.int64)
        in_bundle_M = rows_M != NEW_LABEL
        like_M = np.where(in_bundle_M, rows_M, self._rarest)
        none_BD = np.empty((0, self._bundle.manifest.dim), np.float32)
        buckets_M = np.where(in_bundle_M, labels.buckets[rows_M], np.int8(NEW))

        def column(name: str) -> pa.ChunkedArray:
            return pa.chunked_array([self._display.column(name, [values[name] for values in display])])

        return AddedLabels(
            [record.id for record in records],
            rows_M,
            np.concatenate([none_BD, *embeddings]),
            np.where(in_bundle_M, labels.counts[rows_M], 0),
            # Training has not seen a new label, so its log ν is that of the rarest label.
            labels.log_pn[like_M],
            self._log_popularity(records, rows_M, like_M),
            buckets_M,
            None if labels.bias is None else np.where(in_bundle_M, labels.bias[rows_M], np.float32(0)),
            display,
            self._priors.added_values(rows_M, [record.priors for record in records], buckets_M, column),
            None
            if labels.lifetimes is None
            else np.array([read_lifetime(values) for values in display], np.int64).reshape(-1, 2),
        )

    def _log_popularity(self, records: Sequence[Upsert], rows_M: Int64, like_M: Int64) -> Float32 | None:
        """Compute log π, float32 [M]: of known labels their own, of new ones the forecast's or the rarest's."""
        popularity_L, forecast = self._bundle.labels.log_popularity, self._bundle.forecast
        if popularity_L is None:
            return None
        log_popularity_M = popularity_L[like_M]
        if forecast is not None:
            new = [record for record, row in zip(records, rows_M, strict=True) if row == NEW_LABEL]
            values = [{**record.display, **(record.features or {})} for record in new]
            log_popularity_M[rows_M == NEW_LABEL] = forecast.log_popularity_of_new(
                values, [record.at.timestamp() for record in new]
            )
        return log_popularity_M

    def _require_tower(self, records: Sequence[Upsert]) -> None:
        """Load the tower if a record needs it; raises FixedLabelsError or TowerError."""
        if records and self._bundle.proposal is not None:
            raise FixedLabelsError(
                "expected a release whose labels can change, found one with a tree p_n(y|x), which has no leaf for "
                "them: train again with the changed labels among the data; hiding works"
            )
        # A change of columns alone needs no tower, so releases without one take it too.
        if any(record.features is not None for record in records):
            _ = self._tower

    @cached_property
    def _tower(self) -> Tower:
        bundle = self._bundle
        model = bundle.label_model
        if model is None:
            raise FixedLabelsError(
                "expected a release that can embed new labels, found one without label_tower.onnx: train with label "
                "features other than the id; hiding works"
            )
        manifest = bundle.manifest
        return Tower(model, manifest.label_features, bundle.vocabularies, manifest.dim, file=LABEL_TOWER)

    def _embed(self, records: Sequence[Upsert]) -> Float32:
        """Compute label embeddings, float32 [B, D]; records without features keep the bundle's."""
        unchanged = [i for i, record in enumerate(records) if record.features is None]
        rows = [self._rows.get(records[i].id) for i in unchanged]
        if None in rows:
            raise FeatureError(
                "expected features of a label that the release lacks, received none",
                row=unchanged[rows.index(None)], field="features",
            )  # fmt: skip
        features = [self._features(record) for record in records if record.features is not None]
        embedded_BD = (
            self._tower.embed(self._tower.read(features)) if features else np.empty((0, self._bundle.manifest.dim))
        )
        embeddings_BD = np.empty((len(records), self._bundle.manifest.dim), np.float32)
        embeddings_BD[unchanged] = self._bundle.embeddings[np.array(rows, np.int64)]
        embeddings_BD[np.setdiff1d(np.arange(len(records)), unchanged)] = embedded_BD
        if self._bundle.manifest.similarity == "cosine":
            off_B = np.abs(np.linalg.norm(embeddings_BD, axis=1) - 1) > UNIT_NORM_TOLERANCE
            if off_B.any():
                row = int(off_B.argmax())
                raise FeatureError(
                    "expected features that the label tower gives a direction, received some that it maps to length "
                    f"{np.linalg.norm(embeddings_BD[row]):.3g}",
                    row=row,
                    field="features",
                )
        return embeddings_BD

    def _features(self, record: Upsert) -> Features:
        own_id, features = self._bundle.manifest.own_id, record.features or {}
        if own_id is None or features.get(own_id) is not None:
            return features
        return {**features, own_id: record.id}

    def _display_values(self, record: Upsert) -> dict[str, JsonValue]:
        row = self._rows.get(record.id)
        values = self._display.complete(record.display, {} if row is None else self._display.to_json(row))
        read_lifetime(values)
        return values
