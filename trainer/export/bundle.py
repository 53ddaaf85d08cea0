"""Export of a trained model as a bundle: towers, labels, the curve of the dials, reports.

Legend: `C` calibration queries, `D` dimensions, `N` labels that their queries have seen, `R` entries of a history.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa

from longtail.bundle import Bundle, Loss, OnnxTower
from longtail.bundle.arrays import Int32
from longtail.bundle.bundle import LABEL_TOWER, QUERY_TOWER
from longtail.trainer.cooccurrence import remember_queries
from longtail.trainer.data.dataset import Dataset
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.evaluation.cooccurrence import HistoryEntries
from longtail.trainer.evaluation.dial import Dial
from longtail.trainer.evaluation.ranking import define_buckets
from longtail.trainer.export.onnx import check_parity, export_towers
from longtail.trainer.trained import Trained
from longtail.trainer.warm_start import NEWEST, WEIGHTS_FILE, dump_weights

_CALIBRATION_QUERIES = 1000
"""Largest number of queries in a bundle, by which an index is tuned."""


def to_bundle(
    trained: Trained, earlier_pairs: Pairs, held_out_rows: Int32, past: Past, dial: Dial, reports: dict[str, bytes],
    folder: Path,
) -> Bundle:  # fmt: skip
    """Create the bundle of a trained model, without writing it.

    Args:
        earlier_pairs: the pairs before the forecast period.
        held_out_rows: rows of the past to draw calibration queries from, int32 [n].
        past: histories of these rows; the evaluation left out their labels.
        folder: folder for the towers, and for the tables to which the bundle's tables are links.
    """
    recipe, dataset, model = trained.recipe, trained.dataset, trained.model
    label_side = trained.label_side(earlier_pairs, served=True)
    rng = np.random.default_rng(recipe.seed)
    rows_C = np.sort(rng.permutation(held_out_rows)[:_CALIBRATION_QUERIES]).astype(np.int32)
    inputs = trained.encoding.query.with_history(past).query_inputs(rows_C)
    queries_CD = model.embed_queries(inputs)
    embedded = np.linalg.norm(queries_CD, axis=1) > 0  # a zero vector ranks no label above another
    exclude_history = recipe.evaluation.exclude_seen and (
        trained.cooccurrence is not None
        or any(feature.kind == "history" for feature in trained.encoding.query_features)
    )
    seen_N2 = np.unique(past.seen_labels(rows_C[embedded]).astype(np.int32), axis=0) if exclude_history else None
    histories_CR = None
    if trained.cooccurrence is not None:
        entries = HistoryEntries(past, recipe.history_events)
        histories_CR = entries.padded(rows_C[embedded], trained.cooccurrence.settings.last)
    towers, tables = export_towers(trained, folder)
    check_parity(QUERY_TOWER, folder / QUERY_TOWER, inputs, queries_CD)
    if "label" in towers:
        rows_C, sample = trained.encoding.first_labels(_CALIBRATION_QUERIES)
        check_parity(LABEL_TOWER, folder / LABEL_TOWER, sample, label_side.embeddings[rows_C])
    display = pa.table({}) if dataset.label_table is None else dataset.label_table.select(recipe.data.display)
    encoding, vocabularies = trained.encoding, trained.encoding.vocabularies
    about = {
        "name": recipe.name, "similarity": recipe.served_similarity, "temperature": model.temperature,
        "loss": Loss(family=str(recipe.loss.family), sampler=str(recipe.loss.sampler), weight=str(recipe.loss.weight)),
        "exclude_history": exclude_history, "buckets": define_buckets(recipe.evaluation, label_side.counts),
        "bias_removal": dial.bias_removal, "popularity": dial.popularity, "bonus": dict(dial.bonus),
        "training_data": {
            "fingerprint": dataset.fingerprint,
            "query_id": recipe.data.query_id,
            "label_id": recipe.data.label_id,
            "read_at": dataset.read_at.isoformat(),
            "pairs": len(dataset.train),
            "queries": len(dataset.query_ids),
            "training_queries": dataset.training_queries(),
            "seed": recipe.seed,
            "epochs": len(trained.history.losses),
            **_newest(dataset),
        },
        "software": {"keras": version("keras"), "backend": keras.backend.backend()} | recipe.own_rows,
    }  # fmt: skip
    own_id = None if recipe.own_id is None else recipe.own_id.name
    return Bundle.assemble(
        label_side.labels(dataset.label_ids, display),
        label_side.embeddings,
        queries_CD[embedded],
        OnnxTower(towers["query"], encoding.query_features, vocabularies),
        OnnxTower(towers.get("label"), encoding.label_features, vocabularies, own_id),
        about,
        calibration_seen=seen_N2,
        calibration_histories=histories_CR,
        tables=tables,
        proposal=model.proposal,
        forecast=trained.forecast(earlier_pairs),
        cooccurrence=trained.cooccurrence,
        remembered=None if trained.cooccurrence is None else remember_queries(recipe, dataset, past.known_pairs),
        reports=reports | {WEIGHTS_FILE: dump_weights(model, without=tables)},
    )


def _newest(dataset: Dataset) -> dict[str, str | int]:
    """Return the time of the last training pair; empty without times."""
    times_N = dataset.train.times
    if times_N is None or not np.isfinite(times_N).any():
        return {}
    newest = float(np.nanmax(times_N))
    # A whole number stays an integer; `repr` keeps every digit of a fraction.
    return {NEWEST: int(newest) if newest.is_integer() else repr(newest)}
