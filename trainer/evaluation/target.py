"""Recall where labels have another prior than the data's, from what valid's lists found of every label [METHODS §9].

A service may be judged by pairs whose labels are drawn otherwise than in training: every label alike, or as in another
market. If p(x|y) stays, recall there is that of the held-out pairs, each weighted by π*_y / π_y (label shift), so that
λ and μ can be chosen for it from validation data of the usual kind. What is kept for that is small: how many held-out
pairs a label has, and how many of them the lists found at every setting, counted on the model that was validated.

Legend: `L` labels, `N` queries, `K` length of the lists, `G` settings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from longtail.bundle import Interval
from longtail.bundle.arrays import Float64, Int32, Int64
from longtail.bundle.ids import find_rows
from longtail.tables import find_files
from longtail.tables.database import OpenedFile, open_database
from longtail.tables.table import id_expression, read_table
from longtail.tables.values import to_number
from longtail.trainer.errors import DataError
from longtail.trainer.evaluation.dial import Setting
from longtail.trainer.evaluation.metrics import Bootstrap, Positives

FILE = "valid_by_label.parquet"
"""Its name in a bundle."""
NAMED = {
    "train": "Best if labels are chosen as often as in training",
    "uniform": "Best if all labels are chosen equally often",
}
"""Priors that need no file, and what a report calls them."""
_BELOW = (-1.0, -0.75, -0.5, -0.25)
"""Values of μ in addition to the recipe's grid, for priors with more of the tail."""
_RESAMPLES, _SEED = 200, 0


class TargetRecall(NamedTuple):
    """Recall under a prior at one setting of λ and μ, with a 95 % interval over labels."""

    setting: Setting
    recall: Interval


@dataclass
class FoundByLabel:
    """What lists found of every label's held-out pairs.

    Attributes:
        ids: label ids, strings [L]; of a bundle, of labels with held-out pairs alone.
        frequency_L: π, float64, smoothed; sums to 1 over all labels.
        theory: the settings that are best for a named prior in theory; none for a model with a tree.
        pairs_L, found: held-out pairs, int64, and those in the lists, int64 [L], by setting.
    """

    k: int
    ids: pa.Array
    frequency_L: Float64
    labels: int
    theory: dict[str, Setting] = field(default_factory=dict)
    pairs_L: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    found: dict[Setting, Int64] = field(default_factory=dict)

    def see(self, setting: Setting, top_NK: Int32, positives: Positives) -> None:
        """Count what the lists of one setting found: label rows, best first, int32 [N, ≥ K], −1 after the last."""
        top_NK = top_NK[:, : self.k]
        self.pairs_L = np.bincount(positives.label_rows, minlength=positives.labels)
        self.found[setting] = np.bincount(top_NK[positives.hits(top_NK)], minlength=positives.labels)

    def keep(self, settings: Sequence[Setting]) -> None:
        """Forget what was found at other settings."""
        self.found = {setting: found_L for setting, found_L in self.found.items() if setting in settings}

    def recall(self, prior: str | Path) -> tuple[list[TargetRecall], float]:
        """Compute recall under a prior at every setting, and the share of the prior on labels with held-out pairs.

        Args:
            prior: `train`, `uniform`, or a table with the columns `label` and `share`: any numbers ≥ 0, of any scale;
                labels that are not in it have none.
        """
        weight_L, covered = self._weights(prior)
        held_out = self.pairs_L > 0
        bootstrap = Bootstrap(int(held_out.sum()), resamples=_RESAMPLES, seed=_SEED)
        wanted = (weight_L * self.pairs_L)[held_out]
        recalls = [
            TargetRecall(setting, bootstrap.interval((weight_L * found_L)[held_out], wanted))
            for setting, found_L in self.found.items()
        ]
        return recalls, covered

    def best(self, prior: str | Path) -> tuple[Setting, float]:
        """Return the setting of highest recall under a prior, and that recall."""
        weight_L, _ = self._weights(prior)
        wanted = weight_L @ self.pairs_L
        recalls = {setting: float(weight_L @ found_L / wanted) for setting, found_L in self.found.items()}
        return max(recalls.items(), key=lambda item: item[1])

    def facts(self) -> dict[str, str]:
        """For a report: the best setting under the named priors, and the theory's."""
        facts = {}
        for prior, words in NAMED.items():
            setting, recall = self.best(prior)
            theory = f" (theory: {self.theory[prior]})" if prior in self.theory else ""
            facts[words] = f"{setting}{theory}, recall@{self.k} {recall:.4f} on valid"
        return facts

    def _weights(self, prior: str | Path) -> tuple[Float64, float]:
        """π* / π of the labels that are kept, float64 [L], and the share of π* on those with held-out pairs."""
        prior_L, total = self._prior(prior)
        covered = float(prior_L[self.pairs_L > 0].sum()) / max(total, 1e-300)
        if not covered:
            raise DataError(f"target prior {prior}: expected a share of some label with held-out pairs, found none")
        return prior_L / self.frequency_L, covered

    def _prior(self, prior: str | Path) -> tuple[Float64, float]:
        """π* of the labels that are kept, float64 [L], and its sum over all there are, both of one scale."""
        if prior == "train":
            return self.frequency_L, 1.0
        if prior == "uniform":
            return np.ones(len(self.ids)), float(self.labels)
        ids, shares = read_shares(Path(prior))
        rows = pc.fill_null(find_rows(ids, self.ids), -1).to_numpy()
        prior_L = np.bincount(rows[rows >= 0], weights=shares[rows >= 0], minlength=len(self.ids))
        return prior_L.astype(np.float64), float(shares.sum())

    def to_bytes(self) -> bytes:
        """Return a Parquet file of the labels with held-out pairs."""
        held_out = np.flatnonzero(self.pairs_L)
        columns = {
            "id": self.ids.take(pa.array(held_out)),
            "frequency": self.frequency_L[held_out],
            "pairs": self.pairs_L[held_out].astype(np.int32),
        }
        columns |= {f"found_{at}": found[held_out].astype(np.int32) for at, found in enumerate(self.found.values())}
        about = {"k": self.k, "labels": self.labels, "settings": list(self.found), "theory": self.theory}
        sink = pa.BufferOutputStream()
        table = pa.table(columns).replace_schema_metadata({"longtail": json.dumps(about)})
        pq.write_table(table, sink, compression="zstd")
        return bytes(sink.getvalue())

    @classmethod
    def read(cls, bundle: Path) -> FoundByLabel:
        """From a bundle's directory; labels without held-out pairs are left out."""
        path = bundle / FILE
        if not path.is_file():
            raise DataError(
                f"{bundle}: expected {FILE}, which longtail-train fit writes where it validates, found none"
            )
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"longtail"])
        found = {
            Setting(*setting): table[f"found_{at}"].to_numpy().astype(np.int64)
            for at, setting in enumerate(about["settings"])
        }
        theory = {name: Setting(*setting) for name, setting in about["theory"].items()}
        frequency_L, pairs_L = table["frequency"].to_numpy(), table["pairs"].to_numpy().astype(np.int64)
        return cls(about["k"], table["id"].combine_chunks(), frequency_L, about["labels"], theory, pairs_L, found)


def settings_beyond(measured: Sequence[Setting], *, apart: bool) -> list[Setting]:
    """Get settings that a prior may need and a grid of μ from 0 on lacks: μ < 0 at the λ where μ was measured."""
    if not apart:
        return []
    at = next((setting.bias_removal for setting in measured if setting.popularity), measured[-1].bias_removal)
    return [setting for popularity in _BELOW if (setting := Setting(at, popularity)) not in measured]


def read_shares(path: Path) -> tuple[pa.Array, Float64]:
    """Return label ids, strings [n], and their shares of a prior, float64 [n], from a table of `label` and `share`."""
    if not path.is_file():
        known = ", ".join(NAMED)
        raise DataError(f"target prior: expected {known}, or a file with columns label and share, received {path}")
    with open_database() as reader:
        table = read_table(reader, find_files(path), _shares_in, str(path))
        found = table.arrow(["label", "share"])
    shares: Float64 = found["share"].combine_chunks().to_numpy(zero_copy_only=False)
    if not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise DataError(f"{path}: column 'share': expected finite numbers >= 0, found others")
    return found["label"].combine_chunks(), shares


def _shares_in(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
    value = to_number(*opened.column("share"))
    if value is None:
        raise opened.file.wrong("share", "numbers", opened.column("share")[1].lower())
    return {"label": id_expression(opened, "label", *opened.column("label")), "share": (value, "DOUBLE")}
