"""Score label rows exactly from the bundle, for small candidate sets and for compressed indexes.

The embeddings stay in the bundle's memory-mapped file: only the scored rows are read.

Legend: `B` queries, `C` candidates, `R` rows, `K` results, `E` coordinates of an augmented row.
"""

from __future__ import annotations

import numpy as np

from longtail.bundle import Bundle
from longtail.bundle.arrays import Float32, Int64
from longtail.index.search.candidates import NO_ROW, no_results, top_k

_CHUNK_ROWS = 65_536
"""Rows that `top` scores at once, which bounds its memory."""
_CHUNK_FLOATS = 1 << 24
"""Numbers of candidate rows that `rescore` holds at once: 64 MiB."""


class ExactRows:
    """Score a bundle's augmented rows exactly, by label row."""

    def __init__(self, bundle: Bundle) -> None:
        self.dim = bundle.embeddings.shape[1] + bundle.augmentation.extra_dims
        self._bundle, self._dim = bundle, bundle.embeddings.shape[1]
        self._embeddings_LD = np.asarray(bundle.embeddings)  # every operation on a `memmap` takes microseconds more

    def rescore(self, queries_BE: Float32, rows_BC: Int64) -> Float32:
        """Compute exact scores of each query's own candidates, float32 [B, C]; −inf for row −1."""
        scores_BC = np.empty(rows_BC.shape, np.float32)
        step = max(1, _CHUNK_FLOATS // max(1, rows_BC.shape[1] * self.dim))
        for start in range(0, len(rows_BC), step):
            rows_bC = rows_BC[start : start + step]
            # Row −1 reads row 0 here, and its score becomes −inf below.
            candidates_bCE = self._bundle.rows(np.maximum(rows_bC, 0).ravel()).reshape(*rows_bC.shape, self.dim)
            scores_BC[start : start + step] = (candidates_bCE @ queries_BE[start : start + step, :, None])[..., 0]
        scores_BC[rows_BC == NO_ROW] = -np.inf
        return scores_BC

    def scores(self, query_E: Float32, rows_R: Int64) -> Float32:
        """Compute exact scores of some rows for one query, float32 [R]."""
        # Two products cost less than joining the columns of the rows.
        bundle, embeddings_RD = self._bundle, self._embeddings_LD.take(rows_R, axis=0)
        scores_R: Float32 = embeddings_RD @ query_E[: self._dim]
        # Embeddings without columns give the added coordinates alone.
        scores_R += bundle.augmentation.rows(embeddings_RD[:, :0], *bundle.columns(rows_R)) @ query_E[self._dim :]
        return scores_R

    def top(self, queries_BE: Float32, rows_R: Int64, k: int) -> tuple[Float32, Int64]:
        """Find the k best of `rows_R` for every query: scores float32 [B, k] and rows int64 [B, k]."""
        scores_BK, rows_BK = no_results(len(queries_BE), k)
        for start in range(0, len(rows_R), _CHUNK_ROWS):
            rows_C = rows_R[start : start + _CHUNK_ROWS]
            scores_BC = queries_BE @ self._bundle.rows(rows_C).T
            rows_BC = np.broadcast_to(rows_C, scores_BC.shape)
            scores_BK, rows_BK = top_k([scores_BK, scores_BC], [rows_BK, rows_BC], k)
        return scores_BK, rows_BK
