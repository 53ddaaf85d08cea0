"""Measure an exported model's curve of λ and μ on held-out pairs.

Legend: `N` pairs, `Q` distinct queries, `L` labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtail.bundle import BiasRemoval, CurvePoint, Popularity
from longtail.bundle.arrays import Int32
from longtail.bundle.features import says_nothing
from longtail.trainer.config import EvaluationConfig
from longtail.trainer.data.pairs import Pairs
from longtail.trainer.data.past import Past
from longtail.trainer.errors import ExportError
from longtail.trainer.evaluation.dial import Dial, Noise, Setting, best_dial, best_with_bonus, describe_choice, lines
from longtail.trainer.evaluation.label_side import LabelSide
from longtail.trainer.evaluation.ranking import RankedModel, bias_removal_curve
from longtail.trainer.evaluation.task import HeldOut
from longtail.trainer.tfrs.columns import Ids, strings
from longtail.trainer.tfrs.tower import ExportedTower

BY_THE_CALLER = "the caller of export_tfrs"


@dataclass(frozen=True)
class Validation:
    """Hold pairs that the model was not trained on.

    Attributes:
        queries: ids or columns by name, as in `export_tfrs`, one row per pair.
        labels: the label of every pair, [N]; pairs of labels outside of the catalogue are ignored.
        seen_labels: labels to exclude from each pair's ranking, N lists of ids: the query's labels in training. None
            excludes no labels.
    """

    queries: Ids | Mapping[str, Any]
    labels: Ids
    seen_labels: Sequence[Sequence[Any]] | None = None


def measure_dial(
    validation: Validation,
    query: ExportedTower,
    ids: pa.Array,
    label_side: LabelSide,
    noise: Noise,
    config: EvaluationConfig,
    *,
    bias_removal: float | None,
) -> tuple[Dial, dict[str, bytes]]:
    """Measure the dial with its curve, and write the bundle's metrics.json; `bias_removal` is λ unless chosen."""
    if config.history != "fixed" or config.least_history:
        raise ExportError(
            "evaluation.history, evaluation.least_history: expected none with export_tfrs, whose columns describe each "
            f"query already, received {config.history!r} and {config.least_history}"
        )
    columns = query.columns(validation.queries)
    labels_N = _rows(validation.labels, ids)
    if len(columns) != len(labels_N):
        raise ExportError(f"validation: expected a label for each of {len(columns)} queries, received {len(labels_N)}")
    if validation.seen_labels is not None and len(validation.seen_labels) != len(columns):
        raise ExportError(
            f"validation.seen_labels: expected {len(columns)} lists, received {len(validation.seen_labels)}"
        )
    if not (labels_N >= 0).any():
        raise ExportError(f"validation.labels: expected ids of candidates, such as {ids[0].as_py()!r}, received none")
    rows: dict[Any, int] = {}
    queries_N = np.array([rows.setdefault(row, len(rows)) for row in columns.rows()], np.int32)
    first_Q = np.unique(queries_N, return_index=True)[1]
    embeddings_QD = query.embed(columns.take(first_Q))
    unknown_Q = says_nothing(query.tower.features, query.tower.read(columns.take(first_Q), "validation.queries"))
    seen_labels = validation.seen_labels or []
    held_out = _pairs(queries_N, labels_N)
    earlier_pairs = _pairs(
        np.repeat(queries_N, [*map(len, seen_labels)] or 0), _rows([id_ for some in seen_labels for id_ in some], ids)
    )
    past = Past.fixed(earlier_pairs, queries=len(first_Q))
    config = config.model_copy(update={"exclude_seen": validation.seen_labels is not None})

    model = RankedModel(embeddings_QD.__getitem__, label_side, unknown=unknown_Q.__getitem__)

    def measure(settings: list[Setting]) -> list[CurvePoint]:
        return bias_removal_curve(held_out, past, model, config, seed=0, settings=settings)

    if bias_removal is None:
        why = describe_choice(config)
        before, curve = best_dial(measure, config, noise)
        best = best_with_bonus(measure, curve, before, config, noise)
    else:
        why, best, before = BY_THE_CALLER, Setting(bias_removal), None
    if best != before:
        curve = measure(lines(config, noise, best))
    dial = Dial(
        BiasRemoval(default=best.bias_removal, noise=noise.name, chosen_by=why, curve_split="valid", curve=curve),
        Popularity(default=best.popularity),
        bonus=best.bonus_dials,
    )
    held_out_counts = HeldOut.count(held_out, past, config, labels=len(ids))
    figures = dial.bias_removal.model_dump(mode="json") | {"held_out": {"valid": asdict(held_out_counts)}}
    return dial, {"metrics.json": json.dumps(figures, indent=1, ensure_ascii=False).encode()}


def _rows(label_ids: Any, ids: pa.Array) -> Int32:
    """Find the label rows of ids; −1 for others."""
    rows = pc.fill_null(pc.index_in(strings(label_ids), value_set=ids), -1)
    return np.asarray(rows.to_numpy(zero_copy_only=False), np.int32)


def _pairs(queries: Int32, labels: Int32) -> Pairs:
    return Pairs(queries[labels >= 0], labels[labels >= 0]).sorted()
