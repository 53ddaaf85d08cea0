"""Weights in a bundle for the next training, and their transfer to a new model.

ONNX towers cannot be trained further, so a bundle also has the weights as `weights.npz`: embedding tables and label
biases as `tables/NAME`, with rows in the order of `vocabularies/NAME.arrow`, and dense weights as `query/INDEX…` and
`label/INDEX…`. Large tables are in the bundle as `tables/NAME.npy`. Optimizers start without state.

Legend: `D` dimensions, `L` labels.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import Bundle, Vocabulary
from longtail.bundle.arrays import Array, Float32
from longtail.bundle.bundle import TABLES
from longtail.bundle.mapped_table import read_table
from longtail.trainer.arrays import assign, read_values
from longtail.trainer.backend import ops
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.errors import CheckpointError
from longtail.trainer.model.embedding import EmbeddingTable
from longtail.trainer.model.two_tower import LABEL_BIAS, TwoTower
from longtail.trainer.progress import Reporter

NEWEST = "newest"
"""Key of a manifest's `training_data`: time of the last training pair, in the unit of its column."""
WEIGHTS_FILE = "weights.npz"
_TEMPERATURE = "log_temperature"


@dataclass(frozen=True)
class CarriedOver:
    """Hold the weights that a new model has from an old one.

    Attributes:
        tables: (rows carried over, new rows, vanished rows) by table name, with the out-of-vocabulary row.
        skipped: the reason why a table or weight was not carried over, by name.
    """

    tables: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    dense: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Describe tables, dense weights, and weights that were not carried over, a line each."""
        rows = [
            f"table {name}: {carried:,} rows carried over, {new:,} new, {vanished:,} vanished"
            for name, (carried, new, vanished) in self.tables.items()
        ]
        dense = [f"dense: {', '.join(self.dense)} carried over"] if self.dense else []
        return [*rows, *dense, *(f"{name}: starts fresh: {why}" for name, why in self.skipped.items())]


@dataclass(frozen=True)
class WarmStart:
    """Hold the weights of a trained bundle.

    Attributes:
        sha256: digest of the files with the weights, for the identity of runs that begin with them.
        ids: ids of the rows 1, 2, … of a table, by table; a table of hashed words has none.
        temperature: temperature of the bundle.
        newest: time of the last training pair, in the unit of its column; None if the bundle lacks it.
    """

    sha256: str
    weights: Mapping[str, Float32]
    ids: Mapping[str, pa.Array]
    temperature: float
    newest: float | None = None

    @classmethod
    def read(cls, path: Path) -> WarmStart:
        """Read the weights of a bundle."""
        bundle = Bundle.load(path)
        if WEIGHTS_FILE not in bundle.manifest.files:
            raise CheckpointError(
                f"{path}: expected {WEIGHTS_FILE}, the weights to train on from: fit once without a warm start"
            )
        ids = {name: vocabulary.ids for name, vocabulary in bundle.vocabularies.items()} | {
            LABEL_BIAS: bundle.labels.ids
        }
        newest = bundle.manifest.training_data.get(NEWEST)
        files = [WEIGHTS_FILE, *(f"{TABLES}/{name}.npy" for name in sorted(bundle.tables))]
        sha256 = " ".join(bundle.manifest.files[name].sha256 for name in files)
        weights = _arrays(path / WEIGHTS_FILE)
        weights |= {f"tables/{name}": read_table(file) for name, file in bundle.tables.items()}
        temperature = float(f"{bundle.manifest.temperature:.6g}")  # a float32, to the digits that recipes have
        return cls(sha256, weights, ids, temperature, None if newest is None else float(newest))

    def warn_of_learnt(self, dataset: Dataset, reporter: Reporter) -> None:
        """Report how many held-out pairs the bundle was trained on, judged by time."""
        for name, held_out in (("valid", dataset.valid), ("test", dataset.test)):
            if self.newest is None or held_out.times is None:
                continue
            if learnt := int((held_out.times <= self.newest).sum()):
                reporter.say(
                    f"[bold red]Warm start: {learnt:,} of {len(held_out):,} {name} pairs are no newer than the last "
                    "one that the bundle has learnt from[/]: figures on them are too good"
                )

    def carry_over(self, model: TwoTower, vocabularies: Mapping[str, Vocabulary], label_ids: pa.Array) -> CarriedOver:
        """Copy old weights that fit into a new model with labels `label_ids`; other weights stay initial."""
        carried = CarriedOver()
        ids = {name: vocabulary.ids for name, vocabulary in vocabularies.items()} | {LABEL_BIAS: label_ids}
        for name, table in model.tables.items():
            self._carry_table(name, table, ids.get(name), carried)
        for name, variable in dense_weights(model).items():
            old = self.weights.get(name)
            if old is None:
                carried.skipped[name] = "the bundle has no such weight"
            elif old.shape != tuple(variable.shape):
                carried.skipped[name] = f"expected shape {tuple(variable.shape)}, found {old.shape}"
            else:
                variable.assign(old)
                carried.dense.append(name)
        return carried

    def _carry_table(self, name: str, table: EmbeddingTable, new_ids: pa.Array | None, carried: CarriedOver) -> None:
        key = f"tables/{name}"
        old, old_ids = self.weights.get(f"tables/{name}"), self.ids.get(name)
        if old is None:
            carried.skipped[key] = "the bundle has no such table"
            return
        if old.shape[1] != table.dim:
            carried.skipped[key] = f"expected {table.dim} dimensions, found {old.shape[1]}"
            return
        if new_ids is None or old_ids is None:  # hashed words have no ids
            if len(old) != table.rows:
                carried.skipped[key] = f"expected {table.rows} rows of hashed words, found {len(old)}"
                return
            assign(table.table, old)
            carried.tables[name] = (len(old), 0, 0)
            return
        if len(old) != len(old_ids) + 1:
            carried.skipped[key] = f"expected a row for each of {len(old_ids)} ids, found {len(old) - 1}"
            return
        positions = np.asarray(pc.fill_null(pc.index_in(new_ids, value_set=old_ids), -1), np.int64)
        # Row 0, of unknown ids, is carried over too; −1 keeps the initial row of a new id.
        old_rows = np.concatenate([[0], np.where(positions < 0, -1, positions + 1)])
        rows = read_values(table.table)
        rows[old_rows >= 0] = old[old_rows[old_rows >= 0]]
        assign(table.table, rows)
        common = int((positions >= 0).sum())
        carried.tables[name] = (common + 1, len(positions) - common, len(old_ids) - common)


def _arrays(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: expected arrays of weights: {error}") from error


def dump_weights(model: TwoTower, *, without: Collection[str] = ()) -> bytes:
    """Return all weights for further training, without some tables, as the file `weights.npz`."""
    arrays = {f"tables/{name}": read_values(table.table) for name, table in model.tables.items() if name not in without}
    arrays |= {name: ops.convert_to_numpy(variable) for name, variable in dense_weights(model).items()}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def dense_weights(model: TwoTower) -> dict[str, keras.Variable]:
    """Return trained weights outside of tables by `TOWER/INDEX.LAYER.WEIGHT`.

    These names are stable, while Keras counts up the names of layers within a process.
    """
    named: dict[str, keras.Variable] = {}
    for side, tower in (("query", model.towers.query), ("label", model.towers.label)):
        layers = [layer for layer in tower.layers if layer.trainable_variables]
        for i, layer in enumerate(layers):
            for variable in layer.trainable_variables:
                name = f"{side}/{i}.{type(layer).__name__}.{variable.name}"
                # Nested layers may give the same name again; then a number distinguishes the weights.
                same = sum(existing == name or existing.startswith(f"{name}.") for existing in named)
                named[f"{name}.{same}" if same else name] = variable
    if model.recipe.model.learn_temperature:
        named[_TEMPERATURE] = model.log_temperature
    return named
