"""Hold the answers to a batch as columns; write them as JSON.

Legend: `B` queries in the batch, `K` labels of one answer, `N` answered labels of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from longtail.bundle import Priors
from longtail.bundle.arrays import Float32, Int64
from longtail.serving.core.ranking import Batch
from longtail.serving.core.resolved import ResolvedQuery
from longtail.serving.monitoring import AnsweredBatch

NO_UNKNOWN = 0, 0


@dataclass(kw_only=True)
class Retrieval(AnsweredBatch):
    """Answers to a batch of queries, with figures for monitoring.

    Attributes:
        queries: the resolved queries.
        batch: the embedded queries.
        labels_N: id, bucket and display columns of the answered labels, as JSON; shared, and never changed.
        answered_rows_N: int64, rows of the answered labels; a label that was embedded again has its overlay row.
        heads_B: first fields of each result.
        tails: last fields of results with explored slots, floors or a pool, by the query's position.
        propensities_N: float32, P(shown) of the answered labels given their query; None if no query explored.
        unshifted_B: scores of each query's labels without what `decay` adds to all labels.
        prices: part of the floors' cost of each label, by position of a query with floors.
        explanations: unfinished explanations by the query's position; each is in its result once it has ended.
        unknown_B: numbers of unknown ids in the features and in the history of each query.
        promise_holds: whether the labels available are nearly those of which the release's promises were measured.
    """

    queries: Sequence[ResolvedQuery]
    batch: Batch
    labels_N: Sequence[dict[str, Any]]
    answered_rows_N: Int64
    heads_B: Sequence[Mapping[str, Any]] = ()
    tails: Mapping[int, Mapping[str, Any]]
    propensities_N: Float32 | None
    unshifted_B: Sequence[Float32]
    prices: Mapping[int, Sequence[dict[str, Any] | None]]
    explanations: dict[int, Iterator[None]] = field(default_factory=dict)
    unknown_B: Sequence[tuple[int, int]] = ()
    promise_holds: bool
    priors: Priors
    has_cooccurrence: bool

    def explain(self) -> Self:
        """Finish the explanations."""
        for steps in self.explanations.values():
            for _ in steps:
                pass
        return self

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """Write `RetrieveResult` or `SimilarResult` of the HTTP API for every query; numbers are NumPy's."""
        results, start = [], 0
        # One pass over all labels: slices of NumPy's scores for each query would take twice as long.
        labels_N = [{**label, "score": score} for label, score in zip(self.labels_N, self.scores_N, strict=True)]
        unknown_B = self.unknown_B or [NO_UNKNOWN] * len(self.queries)
        for i, (query, end) in enumerate(zip(self.queries, self.ends_B, strict=True)):
            weights, labels = query.weights, labels_N[start:end]
            if query.display is not None:
                # A new dictionary of columns, because those of `labels_N` are shared with other answers.
                for label in labels:
                    columns = label["display"].items()
                    label["display"] = {name: value for name, value in columns if name in query.display}
            if "exploration" in (tail := self.tails.get(i, {})) and self.propensities_N is not None:
                for label, propensity in zip(labels, self.propensities_N[start:end], strict=True):
                    label["propensity"] = propensity
            result: dict[str, Any] = {**(self.heads_B[i] if self.heads_B else {}), "labels": labels}
            result["bias_removal"], result["popularity"] = weights.bias_removal, weights.popularity
            if self.has_cooccurrence:
                result["cooccurrence"] = weights.cooccurrence
            if query.decay is not None:
                result["decay"] = query.decay.model_dump()
            # Priors of a table always show their weights; other priors only if the weight is not 0.
            if weights.weighed or self.priors.from_table:
                for prior, weight in zip(self.priors.settings, weights.priors_P, strict=True):
                    if prior.source == "table" or (weight and prior.source != "date"):
                        result.setdefault(prior.group, {})[prior.key] = weight
            if tail:
                result.update(tail)
            unknown_query, unknown_history = unknown_B[i]
            result["unknown"] = {
                "query": unknown_query,
                "history": unknown_history,
                "exclude": query.unknown_exclude,
                "allow": query.unknown_allow,
            }
            results.append(result)
            start = end
        return results
