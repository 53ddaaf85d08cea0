"""An index in memory over labels that came after a release was built: quick to make, measured as a build's is."""

from __future__ import annotations

import math

import numpy as np

from longtail.bundle import Bundle
from longtail.index.construct.bands import train_index
from longtail.index.construct.recall import Calibration
from longtail.index.construct.settings import TARGET, efforts_at, efforts_of, trial_at
from longtail.index.manifests import Effort
from longtail.index.search.band import Band
from longtail.index.search.searcher import Searcher

_QUERIES = 50
"""Calibration queries that recall is measured with, at every place on the dials."""


def index_in_memory(bundle: Bundle) -> Searcher:
    """A searcher over a bundle's labels in 2·√L cells, whose rows keep their full precision, float32.

    At each place on the dials it visits the fewest cells that recall what a build looks for, all of them if fewer do
    not. Under filters it looks harder as builds do where it was not measured.

    Args:
        bundle: its L labels are indexed, 4 or more.

    Returns:
        A searcher of rows 0 … L − 1.

    Raises:
        SpecError: FAISS refuses the rows: fewer than cells, or no memory.
    """
    rows_LE = bundle.rows()
    cells = 2 * math.isqrt(len(rows_LE))
    factory = f"IVF{cells},Flat"
    index = train_index(factory, rows_LE.shape[1], rows_LE, "cpu")
    bands = [Band("all", "ivf_flat", factory, index, np.arange(len(rows_LE), dtype=np.int64))]
    calibration = Calibration(bundle, rows_LE, _QUERIES)
    trials = []
    for effort in dict.fromkeys([*efforts_of(bands[0]), Effort(probes=cells)]):
        trials.append(trial_at(bundle, calibration, bands, effort, head=0))
        if trials[-1].lowest.recall >= TARGET:
            break
    chosen = max(trials, key=lambda trial: trial.lowest.recall)
    efforts = efforts_at(bundle, bands, chosen, trials, calibration, lambda _: None)
    return Searcher(bundle, bands, chosen.effort, efforts=efforts)
