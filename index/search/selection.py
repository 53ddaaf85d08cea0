"""Which ids of one index a search may return, as the bitmap that FAISS reads.

Legend: `N` ids of the index, `I` ids.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from longtail.bundle.arrays import Bools, Int64

_BITS = np.left_shift(1, np.arange(8)).astype(np.uint8)


class Selection:
    """A set of the ids 0..N−1; its members never change.

    Args:
        bits: uint8 [⌈N / 8⌉], little-endian; those beyond N are 0.
        size: N.
    """

    def __init__(self, bits: npt.NDArray[np.uint8], size: int) -> None:
        self._bits = bits
        self._size = size
        self._last: tuple[Any, Any] | None = None
        self.count = int(np.bitwise_count(bits).sum(dtype=np.int64))

    @classmethod
    def of(cls, mask_N: Bools) -> Selection:
        """The ids where the mask, bool [N], is true."""
        return cls(np.packbits(mask_N, bitorder="little"), len(mask_N))

    def without(self, ids_I: Int64) -> Selection:
        """The same set but for some ids, which may repeat."""
        if ids_I.size == 0:
            return self
        bits = self._bits.copy()
        np.bitwise_and.at(bits, ids_I >> 3, ~_BITS[ids_I & 7])
        return Selection(bits, self._size)

    def contains(self, ids: Int64) -> Bools:
        """Whether each id, in an array of any shape, is in the set; −1 never is."""
        held: Bools = (self._bits[ids >> 3] & _BITS[ids & 7]) != 0
        held &= ids >= 0
        return held

    @property
    def whole(self) -> bool:
        """Whether every id is in the set."""
        return self.count == self._size

    @property
    def share(self) -> float:
        """Ids in the set per id of the index."""
        return self.count / self._size

    def parameters(self, kind: type, **knobs: int) -> Any:
        """FAISS's search parameters of a kind that rule out every other id; read by any number of threads.

        The last ones are kept, for a set of labels is mostly searched with one effort, and making them costs as much
        as to search a thousand rows.
        """
        key = kind, tuple(knobs.items())
        last = self._last
        if last is None or last[0] != key:
            last = self._last = key, kind(**knobs) if self.whole else kind(**knobs, sel=self._selector)
        return last[1]

    @cached_property
    def _selector(self) -> Any:
        return faiss.IDSelectorBitmap(self._bits)
