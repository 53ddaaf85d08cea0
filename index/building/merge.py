"""Merge labels added or hidden while serving into a bundle, for the next build.

Added labels become ordinary rows at the end: count 0, bucket new, bias 0, log ν and log π of the rarest label. A label
of the bundle that was embedded again keeps its row, count, log ν, log π and bias. Hidden labels lose their row; towers
and vocabularies stay, so queries may still name hidden labels in histories. log ν and log π are normalised again, which
adds one constant each to all labels and changes no order at any λ and μ. Thresholds of buckets, κ, the default λ and
the offline curve keep their values, measured without the added labels. The label changes are only read, because older
releases still need them.

Legend: `L` labels of the bundle, `M` changed ones, `N` labels that calibration queries have seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from longtail.bundle import Buckets, Bundle, LabelChanges, Labels
from longtail.bundle.added_labels import NEW_LABEL, AddedLabels, LabelAdder
from longtail.bundle.arrays import Float32, Int32, Int64
from longtail.bundle.dates import utc
from longtail.bundle.display import DisplayColumns
from longtail.bundle.histories import select_histories
from longtail.bundle.one_line import one_line
from longtail.bundle.store import refuse_existing
from longtail.index.errors import LongtailIndexError
from longtail.state import read_label_changes


@dataclass(frozen=True)
class MergeReport:
    """Counts of written, added, re-embedded and removed labels, and reasons for skipped changes, by id."""

    labels: int
    added: int
    reembedded: int
    removed: int
    skipped: dict[str, str]

    __repr__ = one_line


def merge_labels(bundle: Path, log: str | Path, out: Path) -> MergeReport:
    """Write a bundle with the label changes of a service as its own rows.

    Args:
        log: the service's state directory or database.
        out: directory of the new bundle; after an error it is absent.

    Raises:
        LongtailIndexError: the bundle has a tree p_n(y|x), which has no leaf for new labels; there are no changes; or
            the changes hide every label.
        StoreError, BundleError, OSError: changes or bundle cannot be read, or `out` exists or cannot be written.
    """
    # Before the work, which may take minutes.
    refuse_existing(out)
    try:
        changes = read_label_changes(log)
    except FileNotFoundError as error:
        raise LongtailIndexError(str(error)) from None
    merged, report = with_changes(Bundle.load(bundle), changes)
    merged.write(out)
    return report


def with_changes(source: Bundle, changes: LabelChanges, *, hide: bool = True) -> tuple[Bundle, MergeReport]:
    """Apply label changes to a bundle in memory; raises LongtailIndexError.

    Args:
        hide: leave hidden labels out. Otherwise they keep their rows, and a service's state hides them.
    """
    if source.proposal is not None:
        raise LongtailIndexError(
            f"{source.path}: expected a bundle whose labels can change, found one with a tree p_n(y|x): train again "
            "with the new labels among the data; hidden labels stay hidden by the service's state"
        )
    rows, adder = source.labels.rows_by_id, LabelAdder(source)
    changed = (adder.find_change(changes, id_) for id_ in dict.fromkeys(record.id for record in changes.records()))
    upserts = [upsert for upsert in changed if upsert is not None]
    added, skipped = adder.add(upserts)
    removed = np.array([rows[id_] for id_ in changes.hidden if hide and id_ in rows], np.int64)
    # Positions in the bundle's rows followed by the added ones: a label that was embedded again takes its new row.
    row_L = np.arange(len(rows))
    is_known_M = added.catalogue_rows != NEW_LABEL
    row_L[added.catalogue_rows[is_known_M]] = len(rows) + np.flatnonzero(is_known_M)
    rows_n = np.concatenate([np.delete(row_L, removed), len(rows) + np.flatnonzero(~is_known_M)])
    if not rows_n.size:
        raise LongtailIndexError(f"{source.path}: expected a label that is left, found all {len(rows)} hidden")
    report = MergeReport(
        labels=len(rows_n),
        added=int(np.count_nonzero(~is_known_M)),
        reembedded=int(np.count_nonzero(is_known_M)),
        removed=len(removed),
        skipped=skipped,
    )
    # The row of the bundle that each label had; −1 for an added one.
    before_n = np.concatenate([np.arange(len(rows)), added.catalogue_rows])[rows_n]
    histories = source.calibration_histories
    manifest = source.manifest
    newest = max((record.at for record in changes.records()), default=adder.data_until)
    merged = replace(
        source,
        manifest=manifest.model_copy(
            update={
                "labels": report.labels,
                "created_at": max(utc(manifest.created_at), newest),
                "training_data": manifest.training_data
                | {
                    "read_at": max(adder.data_until, newest).isoformat(),
                    "labels_added": report.added,
                    "labels_reembedded": report.reembedded,
                    "labels_removed": report.removed,
                },
            }
        ),
        labels=_labels(source.labels, added, rows_n, manifest.buckets),
        embeddings=np.concatenate([source.embeddings, added.embeddings])[rows_n],
        calibration_seen=None if (seen_N2 := source.calibration_seen) is None else _renumber_seen(seen_N2, removed),
        calibration_histories=None if histories is None else select_histories(histories, before_n),
        forecast=source.forecast
        and source.forecast.with_labels(
            added.catalogue_rows,
            [{**record.display, **(record.features or {})} for record in upserts if record.id not in skipped],
            [record.at.timestamp() for record in upserts if record.id not in skipped],
        ).take(rows_n),
        cooccurrence=source.cooccurrence and source.cooccurrence.take(before_n),
        remembered=source.remembered and source.remembered.take(before_n),
        priors=replace(source.priors, values_LP=np.concatenate([source.priors.values_LP, added.priors])[rows_n])
        if source.priors.settings
        else source.priors,
        reports=source.stored_reports(),
        path=None,
    )
    return merged, report


def _labels(labels: Labels, added: AddedLabels, rows_n: Int64, buckets: Buckets) -> Labels:
    """Append the added labels to the label table, and take the rows `rows_n`."""
    bias, log_popularity = (
        None if column is None or more is None else np.concatenate([column, more])
        for column, more in ((labels.bias, added.bias), (labels.log_popularity, added.log_popularity))
    )
    columns = DisplayColumns(labels.display)
    display = {}
    for name in labels.display.column_names:
        more = columns.column(name, [display[name] for display in added.display])
        before = labels.display[name].cast(more.type)
        display[name] = pa.chunked_array([*before.chunks, more]).take(rows_n)
    counts = np.concatenate([labels.counts, added.counts])[rows_n]
    return Labels(
        ids=pa.concat_arrays([labels.ids, pa.array(added.ids, labels.ids.type)]).take(rows_n),
        counts=counts,
        log_pn=_normalised(np.concatenate([labels.log_pn, added.log_pn])[rows_n]),
        buckets=buckets.assign(counts),
        bias=None if bias is None else bias[rows_n],
        display=pa.table(display),
        log_popularity=None if log_popularity is None else _normalised(log_popularity[rows_n]),
    )


def _renumber_seen(seen_N2: Int32, removed: Int64) -> Int32:
    """Remove labels from what calibration queries have seen, and renumber the others."""
    queries_N, rows_N = seen_N2[~np.isin(seen_N2[:, 1], removed)].T
    return np.stack([queries_N, rows_N - np.sort(removed).searchsorted(rows_N)], 1).astype(np.int32)


def _normalised(log_p_L: Float32) -> Float32:
    # In float64, because rounding errors of a float32 sum over millions of labels add up.
    exact_L = log_p_L.astype(np.float64)
    normalised_L: Float32 = (exact_L - np.logaddexp.reduce(exact_L)).astype(np.float32)
    return normalised_L
