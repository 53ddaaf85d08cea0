"""What a build measured, in a few lines for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from longtail.index.manifests import IndexManifest, RecallAt


def summary(index: IndexManifest) -> list[str]:
    """Recall, the kinds that `auto` measured, whose cells these are, and recall under filters."""
    lines = [f"recall@{index.recall_k} at λ: {recalls_in_words(index.recall)}"]
    for trial in index.kinds:
        rate = "not timed" if trial.queries_per_second is None else f"{trial.queries_per_second:,.0f} queries/s"
        lines.append(
            f"{'*' if trial.kind == index.kind else ' '} {trial.kind}: recall {trial.lowest.recall:.3f} or more, "
            f"{rate}, {trial.bytes_per_label:.1f} bytes per label"
        )
    if (cells := index.partition) is not None:
        lines.append(
            f"cells trained by {cells.trained_by}: {cells.newer:,} labels came or were embedded anew since, "
            f"imbalance {cells.imbalance:.2f}, {cells.imbalance_trained:.2f} then"
        )
    if (filtered := index.filtered) is not None:
        lowest = [f"{selectivity:.1%} of the labels: {recall:.3f}" for selectivity, recall in filtered.lowest().items()]
        lines.append(f"lowest recall under filters: {', '.join(lowest)}")
    return lines


def recalls_in_words(recall: Sequence[RecallAt]) -> str:
    """Recall along λ and μ at the priors' default weights, and the lowest of the other weights."""
    default = recall[0].priors
    along = [at for at in recall if at.priors == default]
    shown = [
        f"{at.bias_removal:g}{f' (μ {at.popularity:g})' if at.popularity else ''}: {at.recall:.3f}" for at in along
    ]
    if others := [at for at in recall if at.priors != default]:
        lowest = min(others, key=lambda at: at.recall)
        shown.append(f"at {len(others)} corners of the priors' weights {lowest.recall:.3f} or more ({lowest.where})")
    return ", ".join(shown)
