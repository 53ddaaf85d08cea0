"""Score labels by what was chosen with a query's last labels [METHODS §11].

`c(x, y) = Σ γ^age(j) · W[j, y]` over the last R entries j of a history, age 0 for the newest. W ≥ 0 has at most N
entries a row and no diagonal; `neighbours.py` makes it.

Legend: `L` labels, `N` neighbours of a label, `H` entries of a history, `C` labels with c > 0, `M` all neighbours of a
history, or labels that stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.errors import require, require_array
from longtail.bundle.histories import NO_ENTRY, renumber
from longtail.bundle.manifest import CooccurrenceSettings
from longtail.bundle.mapped_table import read_table
from longtail.bundle.one_line import one_line

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

FILES = ("cooccurrence.rows.npy", "cooccurrence.weights.npy", "cooccurrence.degrees.npy")
"""Files of a bundle with `rows_LN`, `weights_LN` and `degrees_L`."""


class Term(NamedTuple):
    """Labels with c > 0, int64 [C], ascending, and c, float32 [C]."""

    rows_C: Int64
    values_C: Float32


NO_TERM = Term(np.empty(0, np.int64), np.empty(0, np.float32))


@dataclass(frozen=True)
class Cooccurrence:
    """W of a bundle, with the settings of c.

    Attributes:
        rows_LN: label rows of every label's neighbours, int32, of descending weight; −1 beyond the last.
        weights_LN: their W, float32; 0 beyond the last.
        degrees_L: d, float32, from which later pairs recompute W.
    """

    settings: CooccurrenceSettings
    rows_LN: Int32
    weights_LN: Float32
    degrees_L: Float32

    __repr__ = one_line

    def term(self, history_H: npt.NDArray[np.integer]) -> Term:
        """Compute c of a history of label rows, oldest first."""
        entries_H = history_H[-self.settings.last :]
        if not len(entries_H):
            return NO_TERM
        halves_HN2 = np.empty((len(entries_H), self.settings.neighbours, 2), "<i4")
        halves_HN2[..., 1] = self.rows_LN.take(entries_H, axis=0)
        factors_H1 = self.factors(len(entries_H))[:, None]
        np.multiply(self.weights_LN.take(entries_H, axis=0), factors_H1, out=halves_HN2.view("<f4")[..., 0])
        # A row and its weight >= 0 are the halves of one integer, because sorting integers is quicker than argsort.
        halves_M2 = np.sort(halves_HN2.view("<i8"), axis=None).view("<i4").reshape(-1, 2)
        rows_M = halves_M2[:, 1]
        first_M = np.ones(len(rows_M), np.bool_)
        np.not_equal(rows_M[1:], rows_M[:-1], out=first_M[1:])
        starts_C = np.flatnonzero(first_M)
        values_C = np.add.reduceat(halves_M2.view("<f4")[:, 0], starts_C)
        rows_C = rows_M.take(starts_C).astype(np.int64)
        if rows_C[0] == NO_ENTRY:
            rows_C, values_C = rows_C[1:], values_C[1:]
        return Term(rows_C, values_C)

    def parts(self, history_H: npt.NDArray[np.integer], row: int) -> Float32:
        """Compute each last entry's part of the c of one label, float32 [min(H, `last`)]."""
        entries_H = history_H[-self.settings.last :]
        is_label_HN = self.rows_LN[entries_H] == row
        parts_H: Float32 = (self.weights_LN[entries_H] * is_label_HN).sum(axis=1) * self.factors(len(entries_H))
        return parts_H

    def factors(self, entries: int) -> Float32:
        """Return γ^age of a history's last entries, oldest first, float32 [entries]; over their sum for a mean."""
        factors_H = self._all_factors[len(self._all_factors) - entries :]
        return factors_H / factors_H.sum() if self.settings.mean else factors_H

    @cached_property
    def _all_factors(self) -> Float32:
        return (self.settings.decay ** np.arange(self.settings.last - 1, -1, -1.0)).astype(np.float32)

    def matrix(self, labels_M: Int64 | slice = slice(None)) -> csr_matrix:
        """Return W, or rows of it, as a sparse float32 matrix [M, L]."""
        from scipy.sparse import csr_matrix

        rows_MN = self.rows_LN[labels_M]
        is_neighbour_MN = rows_MN != NO_ENTRY
        starts = np.append(0, np.cumsum(is_neighbour_MN.sum(axis=1)))
        shape = len(rows_MN), len(self.rows_LN)
        return csr_matrix((self.weights_LN[labels_M][is_neighbour_MN], rows_MN[is_neighbour_MN], starts), shape)

    def deviation(self, histories: Iterable[npt.NDArray[np.integer]]) -> float:
        """Compute the mean standard deviation of c over labels for some histories; 0 without any."""
        labels, deviations = len(self.rows_LN), list[float]()
        for history_H in histories:
            values_C = self.term(history_H).values_C.astype(np.float64)
            deviations.append(float(np.sqrt(values_C @ values_C / labels - (values_C.sum() / labels) ** 2)))
        return float(np.mean(deviations)) if deviations else 0.0

    def scaled(self, factor: float, **settings: Any) -> Cooccurrence:
        """Multiply W by a factor, and replace some settings."""
        changed = self.settings.model_copy(update={"scale": self.settings.scale * factor, **settings})
        return replace(self, settings=changed, weights_LN=self.weights_LN * np.float32(factor))

    def take(self, rows_M: Int64) -> Cooccurrence:
        """Take the labels of some rows, int64 [M]; −1 for a label without pairs. Others are neighbours of none."""
        stays_M1 = rows_M[:, None] >= 0
        rows_MN = renumber(rows_M, len(self.rows_LN))[np.where(stays_M1, self.rows_LN[rows_M], NO_ENTRY)]
        # Stable, so that the neighbours that stay keep their order by weight.
        order_MN = np.argsort(rows_MN == NO_ENTRY, axis=1, kind="stable")
        weights_MN = np.where(rows_MN == NO_ENTRY, np.float32(0), self.weights_LN[rows_M])
        return replace(
            self,
            rows_LN=np.take_along_axis(rows_MN, order_MN, axis=1),
            weights_LN=np.take_along_axis(weights_MN, order_MN, axis=1),
            degrees_L=np.where(stays_M1[:, 0], self.degrees_L[rows_M], np.float32(0)),
        )

    def write(self, folder: Path) -> None:
        """Write `FILES` into a folder."""
        for name, array in zip(FILES, (self.rows_LN, self.weights_LN, self.degrees_L), strict=True):
            np.save(folder / name, array, allow_pickle=False)

    @classmethod
    def read(cls, folder: Path, settings: CooccurrenceSettings) -> Cooccurrence:
        """Map `FILES` of a folder."""
        # Plain arrays of the maps: every operation on a `memmap` takes microseconds more.
        rows_LN, weights_LN, degrees_L = (np.asarray(read_table(folder / name)) for name in FILES)
        return cls(settings, rows_LN, weights_LN, degrees_L)  # type: ignore[arg-type]  # the first is int32

    def check(self, labels: int) -> None:
        """Check the arrays; raises BundleInvariantError."""
        rows_LN, weights_LN, degrees_L = self.rows_LN, self.weights_LN, self.degrees_L
        require_array(FILES[0], rows_LN, np.int32, labels=labels, neighbours=self.settings.neighbours)
        require_array(FILES[1], weights_LN, np.float32, labels=labels, neighbours=self.settings.neighbours)
        require_array(FILES[2], degrees_L, np.float32, labels=labels)
        inside = bool(((rows_LN >= NO_ENTRY) & (rows_LN < labels)).all())
        require(f"{FILES[0]} holds label rows, or -1", inside, f"-1..{labels - 1}", f"{rows_LN.min()}..{rows_LN.max()}")
        sorted_LN = np.sort(rows_LN, axis=1)
        repeated_LN = (sorted_LN[:, 1:] == sorted_LN[:, :-1]) & (sorted_LN[:, 1:] != NO_ENTRY)
        for invariant, broken in {
            f"{FILES[0]} has no label as its own neighbour": rows_LN == np.arange(labels)[:, None],
            f"{FILES[0]} has every neighbour of a label once": repeated_LN,
            f"{FILES[1]} is finite and >= 0": ~(np.isfinite(weights_LN) & (weights_LN >= 0)),
            f"{FILES[1]} is 0 without a neighbour": (rows_LN == NO_ENTRY) & (weights_LN != 0),
            f"{FILES[2]} is finite and >= 0": ~(np.isfinite(degrees_L) & (degrees_L >= 0)),
        }.items():
            require(invariant, not broken.any(), "so in every row", f"otherwise in {np.count_nonzero(broken)} entries")
