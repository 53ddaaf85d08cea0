"""Labels that a model ranks first for the queries of the training pairs, and what a batch takes of them.

Legend: `N` training pairs, `A` lists, `K` their length, `B` batch, `S` negatives that a row takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from longtail.bundle.arrays import Int32, Int64


@dataclass(frozen=True)
class Retrieved:
    """A list of labels for every query of the training pairs.

    Attributes:
        lists_AK: label rows, best first, int32; −1 where a list ends early.
        list_of_N: the list of every pair, int32.
    """

    lists_AK: Int32
    list_of_N: Int32
    negatives: int

    @classmethod
    def nothing(cls, pairs: int, *, negatives: int) -> Self:
        """Empty lists of so many pairs."""
        return cls(np.full((1, 1), -1, np.int32), np.zeros(pairs, np.int32), negatives)

    def draw(self, pairs_B: Int64, positive_B: Int32, rng: np.random.Generator) -> Int32:
        """Of each row's list as many equal parts as are drawn, and of each a label, int32 [B, S].

        Every entry is drawn alike often, S/K times; the whole list where it is no longer than S. Places left over hold
        the row's positive.

        Args:
            pairs_B: rows of the training pairs, int64.
            positive_B: their labels, int32.
        """
        lists_BK = self.lists_AK[self.list_of_N[pairs_B]]
        lengths_B1 = np.sum(lists_BK >= 0, axis=1, keepdims=True)
        drawn_B1 = np.minimum(lengths_B1, self.negatives)
        places_S = np.arange(self.negatives)
        random_BS = rng.random((len(pairs_B), self.negatives))
        at_BS = ((places_S + random_BS) * lengths_B1 / np.maximum(drawn_B1, 1)).astype(np.int64)
        at_BS = np.clip(at_BS, 0, np.maximum(lengths_B1 - 1, 0))
        labels_BS = np.take_along_axis(lists_BK, at_BS, axis=1)
        return np.where(places_S < drawn_B1, labels_BS, positive_B[:, None]).astype(np.int32)
