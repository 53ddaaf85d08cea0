"""Clicks on exported answers, weighted by 1 / propensity: what users want, and not what chance showed them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from longtail.serving import create_app
from longtail.serving.export import export
from longtail.serving.settings import Settings
from tests.bundles import make_bundle
from tests.end_to_end.releases import publish_bundle
from tests.serving.client import open_client
from tests.serving.process import until

REQUESTS, QUERIES = 30, 100
QUERY = {"features": {"user_id": "u3"}, "k": 8, "explore": {"tail": 2}}


def test_weighted_recall_of_exported_clicks_is_the_true_one(tmp_path: Path) -> None:
    """Who is shown a label clicks it with a probability of its own, larger for labels that are drawn more often.

    Recall of the labels that are always shown is Σ P(click) over them, of that sum over them and all candidates.
    """
    rng = np.random.default_rng(1)
    releases = publish_bundle(make_bundle(labels=40), tmp_path)
    chances: dict[str, float] = {}
    always, drawn = set[str](), dict[str, float]()

    def clicks(result: dict[str, Any]) -> list[str]:
        for label in result["labels"]:
            chances.setdefault(label["id"], min(0.9, 0.05 + 3 * label["propensity"]))
            if label["propensity"] == 1:
                always.add(label["id"])
            else:
                drawn[label["id"]] = label["propensity"]
        return [label["id"] for label in result["labels"] if rng.random() < chances[label["id"]]]

    with open_client(create_app(Settings(releases=releases))) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        for _ in range(REQUESTS):
            results = client.post("/v1/retrieve", json={"queries": [QUERY] * QUERIES}).json()["results"]
            events = [
                {"answer_id": result["answer_id"], "labels": labels, "features": QUERY["features"]}
                for result in results
                if (labels := clicks(result))
            ]
            assert client.post("/v1/feedback", json={"events": events}).status_code == 200
    assert len(drawn) == results[0]["exploration"]["candidates"]["tail"] > 10
    assert abs(sum(drawn.values()) - 2) < 1e-3
    export(releases, releases / ".state/events", tmp_path / "out.parquet", window=(0, time.time() + 1))
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()

    def recall(column: str) -> tuple[float, float]:
        """Estimate it as a ratio of sums over answers, with its standard error."""
        of_answer: dict[str, np.ndarray] = {}
        for row in rows:
            hit = row["label_id"] in always
            of_answer[row["answer"]] = of_answer.get(row["answer"], np.zeros(2)) + row[column] * np.array([hit, 1])
        hits_A, all_A = np.stack([*of_answer.values()]).T
        value = hits_A.sum() / all_A.sum()
        return value, float(np.sqrt(((hits_A - value * all_A) ** 2).sum()) / all_A.sum())

    expected = sum(chances[label] for label in always)
    truth = expected / (expected + sum(chances[label] for label in drawn))
    (weighted, error), (plain, _) = recall("debiased_weight"), recall("weight")
    print(f"\ntrue recall {truth:.4f}, weighted {weighted:.4f} ± {error:.4f}, unweighted {plain:.4f}")
    assert abs(weighted - truth) < 4 * error < 0.1
    assert abs(plain - truth) > 10 * error
