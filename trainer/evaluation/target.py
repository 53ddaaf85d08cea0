"""Compute recall under another prior of labels [METHODS §9].

A service may be judged by pairs whose labels are drawn otherwise than in training: uniformly, or as in another market.
If p(x|y) stays, recall there is that of the held-out pairs, each weighted by π*_y / π_y (label shift). So λ and μ can
be chosen from usual validation data: the number of held-out pairs of a label, and of hits at every setting.

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
    """Hold recall under a prior, with a 95 % interval over labels."""

    setting: Setting
    recall: Interval


@dataclass
class HitsByLabel:
    """Count hits by label at every setting.

    Attributes:
        ids: label ids, strings [L]; in a bundle, only labels with held-out pairs.
        frequency_L: π, float64, smoothed; sums to 1 over all labels.
        theory: the best setting in theory by named prior; empty for a model with a tree.
        pairs_L: held-out pairs, int64 [L].
        hits: held-out pairs in the lists, int64 [L] by setting.
    """

    k: int
    ids: pa.Array
    frequency_L: Float64
    labels: int
    theory: dict[str, Setting] = field(default_factory=dict)
    pairs_L: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    hits: dict[Setting, Int64] = field(default_factory=dict)

    def count_hits(self, setting: Setting, top_NK: Int32, positives: Positives) -> None:
        """Count the hits of one setting's lists: label rows, best first, int32 [N, ≥ K], −1 after the last."""
        top_NK = top_NK[:, : self.k]
        self.pairs_L = np.bincount(positives.label_rows, minlength=positives.labels)
        self.hits[setting] = np.bincount(top_NK[positives.hits(top_NK)], minlength=positives.labels)

    def keep(self, settings: Sequence[Setting]) -> None:
        """Drop the hits of other settings."""
        self.hits = {setting: hits_L for setting, hits_L in self.hits.items() if setting in settings}

    def recall(self, prior: str | Path) -> tuple[list[TargetRecall], float]:
        """Compute recall by setting, and the prior's share on held-out labels.

        Args:
            prior: `train`, `uniform`, or a table with the columns `label` and `share`, numbers ≥ 0 of any scale; labels
                outside the table have share 0.
        """
        weight_L, covered = self._weights(prior)
        held_out = self.pairs_L > 0
        bootstrap = Bootstrap(int(held_out.sum()), resamples=_RESAMPLES, seed=_SEED)
        pairs_l = (weight_L * self.pairs_L)[held_out]
        recalls = [
            TargetRecall(setting, bootstrap.interval((weight_L * hits_L)[held_out], pairs_l))
            for setting, hits_L in self.hits.items()
        ]
        return recalls, covered

    def best(self, prior: str | Path) -> tuple[Setting, float]:
        """Return the best setting under a prior and its recall."""
        weight_L, _ = self._weights(prior)
        pairs = weight_L @ self.pairs_L
        recalls = {setting: float(weight_L @ hits_L / pairs) for setting, hits_L in self.hits.items()}
        return max(recalls.items(), key=lambda item: item[1])

    def facts(self) -> dict[str, str]:
        """Describe the best setting under each named prior."""
        facts = {}
        for prior, words in NAMED.items():
            setting, recall = self.best(prior)
            theory = f" (theory: {self.theory[prior]})" if prior in self.theory else ""
            facts[words] = f"{setting}{theory}, recall@{self.k} {recall:.4f} on valid"
        return facts

    def _weights(self, prior: str | Path) -> tuple[Float64, float]:
        """Return π* / π, float64 [L], and π*'s share on held-out labels."""
        prior_L, total = self._prior(prior)
        # A prior of zeros divides by almost nothing here, and is refused in the next line.
        covered = float(prior_L[self.pairs_L > 0].sum()) / max(total, 1e-300)
        if not covered:
            raise DataError(f"target prior {prior}: expected a share of some label with held-out pairs, found none")
        return prior_L / self.frequency_L, covered

    def _prior(self, prior: str | Path) -> tuple[Float64, float]:
        """Return π*, float64 [L], and its sum over the catalogue."""
        # Sums are over the whole catalogue, of which a bundle's `ids` hold a part.
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
        columns |= {f"found_{i}": hits_L[held_out].astype(np.int32) for i, hits_L in enumerate(self.hits.values())}
        about = {"k": self.k, "labels": self.labels, "settings": list(self.hits), "theory": self.theory}
        sink = pa.BufferOutputStream()
        table = pa.table(columns).replace_schema_metadata({"longtail": json.dumps(about)})
        pq.write_table(table, sink, compression="zstd")
        return bytes(sink.getvalue())

    @classmethod
    def read(cls, bundle: Path) -> HitsByLabel:
        """Read from a bundle's directory; labels without held-out pairs are left out."""
        path = bundle / FILE
        if not path.is_file():
            raise DataError(
                f"{bundle}: expected {FILE}, which longtail-train fit writes where it validates, found none"
            )
        table = pq.read_table(path)
        about = json.loads(table.schema.metadata[b"longtail"])
        hits = {
            Setting(*setting): table[f"found_{i}"].to_numpy().astype(np.int64)
            for i, setting in enumerate(about["settings"])
        }
        theory = {name: Setting(*setting) for name, setting in about["theory"].items()}
        frequency_L, pairs_L = table["frequency"].to_numpy(), table["pairs"].to_numpy().astype(np.int64)
        return cls(about["k"], table["id"].combine_chunks(), frequency_L, about["labels"], theory, pairs_L, hits)


def list_tail_settings(measured: Sequence[Setting], *, separate_prior: bool) -> list[Setting]:
    """List settings with μ < 0 for priors of the tail."""
    if not separate_prior:
        return []
    bias_removal = next((setting.bias_removal for setting in measured if setting.popularity), measured[-1].bias_removal)
    return [setting for popularity in _BELOW if (setting := Setting(bias_removal, popularity)) not in measured]


def read_shares(path: Path) -> tuple[pa.Array, Float64]:
    """Read label ids, strings [n], and their shares, float64 [n]."""
    if not path.is_file():
        raise DataError(
            f"target prior: expected {', '.join(NAMED)}, or a file with columns label and share, received {path}"
        )
    with open_database() as reader:
        table = read_table(reader, find_files(path), _read_share_columns, str(path))
        columns = table.arrow(["label", "share"])
    shares: Float64 = columns["share"].combine_chunks().to_numpy(zero_copy_only=False)
    if not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise DataError(f"{path}: column 'share': expected finite numbers >= 0, found others")
    return columns["label"].combine_chunks(), shares


def _read_share_columns(opened: OpenedFile, _: int) -> dict[str, tuple[str, str]]:
    value = to_number(*opened.column("share"))
    if value is None:
        raise opened.file.wrong("share", "numbers", opened.column("share")[1].lower())
    return {"label": id_expression(opened, "label", *opened.column("label")), "share": (value, "DOUBLE")}
