"""Requests that mix all options of a list, against brute force over all labels: 100 for each change, 2,000 nightly."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Patch
from longtail.index import Limits
from longtail.index.building.priors import PriorSpec
from longtail.serving import Retriever
from longtail.serving.core.queries import RetrieveQuery
from tests.serving.core.shop import DATED, dated, shop_bundle
from tests.serving.core.test_bonus import BRIGHT, PATCHED, Weighed, draw_weights
from tests.serving.core.test_cooccurrence import AT, L, changes, draw_query
from tests.serving.core.test_diversity import greedily
from tests.serving.core.test_floors import draw_floors, list_by_rule
from tests.serving.plane import make_retriever, read_results

ENDS = [
    Patch(id="item-33", at=AT, display={"available_until": (DATED + timedelta(seconds=5)).isoformat()}),
    Patch(id="new-41", at=AT, display={"available_from": (DATED - timedelta(seconds=5)).isoformat()}),
]


@cache
def served(spec: str) -> Retriever:
    """A release with lifetimes, bonuses, a slope, decay and ω·c, after changes of its labels."""
    bundle = dated(shop_bundle(L, cooccurrence=True, bias=spec == "flat", popularity=spec == "flat"))
    local = PriorSpec(None, {"bright": BRIGHT}, {"since": "12h"}, {"price": Limits(-3, 3)})
    bundle = replace(bundle, priors=local.read(bundle))
    return make_retriever(bundle, spec, *changes(), *PATCHED, *ENDS)


def parse_time(text: str | None) -> datetime | None:
    at = datetime.fromisoformat(text) if text else None
    return at if at is None or at.tzinfo else at.replace(tzinfo=UTC)


def is_available(display: dict[str, Any], now: datetime) -> bool:
    begin, end = parse_time(display["available_from"]), parse_time(display["available_until"])
    return (begin is None or begin <= now) and (end is None or now < end)


@pytest.mark.parametrize("spec", ["flat", pytest.param("ivf_flat", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10))])
def test_lists_equal_brute_force(seed: int, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, retriever = np.random.default_rng(seed), served(spec)
    formula, changed = Weighed(retriever), 0
    for second in rng.integers(-60, 60, 5).tolist():
        now = DATED + timedelta(seconds=second, microseconds=500)
        monkeypatch.setattr("longtail.serving.core.lifetimes.now", now.timestamp)
        monkeypatch.setattr("tests.serving.core.test_bonus.NOW", now)
        drawn = []
        for _ in range(20):
            query, history, left_out = draw_query(rng, "cosine", retriever.bundle)
            options = query.model_dump(exclude_unset=True) | draw_weights(rng)
            if rng.random() < 0.5:
                floors, buckets = draw_floors(rng, query.k), query.buckets
                options["at_least"] = [
                    floor for floor in floors if buckets is None or floor.get("bucket", "tail") in buckets
                ]
            elif rng.random() < 0.4:
                options |= {"max_per": {"brand": int(rng.integers(1, 4))}, "pool": max(L, query.k)}
            drawn.append((RetrieveQuery.model_validate(options), history, left_out))
        results = read_results(retriever.view_at().retrieve([query for query, _, _ in drawn]))
        for (query, history, left_out), result in zip(drawn, results, strict=True):
            rows, scores = formula.best(query, history, left_out)
            shown_of = dict(zip(formula.rows, formula.labels_json, strict=True))
            eligible = [i for i, row in enumerate(rows.tolist()) if is_available(shown_of[row]["display"], now)]
            rows, scores = rows[eligible], scores[eligible]
            expected = rows[: query.k].tolist()
            if query.max_per:
                expected = greedily(retriever, rows, query.max_per, query.k)
            if query.at_least:
                labels = [{**shown_of[row], "row": row} for row in rows.tolist()]
                floors = [floor.model_dump(exclude_unset=True) for floor in query.at_least]
                expected = [label["row"] for label in list_by_rule(labels, floors, query.k)]
            changed += expected != rows[: query.k].tolist()
            # Labels of one score, such as added ones with equal features, may change places.
            score_of = dict(zip(rows.tolist(), scores, strict=True))
            answered = [retriever.catalogue.row(label["id"]) for label in result["labels"]]
            scale = 3e-6 * max(1.0, np.abs(formula.scores(query, history)).max())
            assert len(set(answered)) == len(answered) == len(expected)
            assert set(answered) <= score_of.keys(), "a label that is excluded, filtered out or not available"
            np.testing.assert_allclose(
                [label["score"] for label in result["labels"]], [score_of[row] for row in expected], rtol=0, atol=scale
            )
            np.testing.assert_allclose(
                [score_of[row] for row in answered], [score_of[row] for row in expected], rtol=0, atol=2 * scale
            )
    assert changed > 20, "floors and max_per change too few lists for the test to say anything"
