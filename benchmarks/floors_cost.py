"""CPU time of a request with floors against one without, and what floors cost that share labels.

python -m benchmarks.floors_cost --labels 200000 --spec ivf_flat
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import typer
from scipy.optimize import Bounds, LinearConstraint, milp

from longtail.serving.core.queries import Query
from tests.serving.core.shop import meets, shop_bundle
from tests.serving.core.test_cooccurrence import retriever_of
from tests.serving.plane import results_of

_BRAND, _PRICE = {"filter": {"brand": "brand-2"}, "n": 6}, {"filter": {"price": {"lt": 0.5}}, "n": 5}
_KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "one that is met": {"at_least": [{"bucket": "head", "n": 1}]},
    "one of a bucket": {"at_least": [{"bucket": "tail", "n": 8}]},
    "one of a filter": {"at_least": [_BRAND]},
    "two of buckets": {"at_least": [{"bucket": "tail", "n": 8}, {"bucket": "torso", "n": 8}]},
    "two that share labels": {"at_least": [{"bucket": "tail", "n": 8}, _BRAND]},
    "one slot to explore": {"explore": {"tail": 1}},
    "two of a brand at most": {"max_per": {"brand": 2}},
}


def main(labels: int = 200_000, spec: str = "ivf_flat", rounds: int = 60, overlapping: int = 200) -> None:
    """Print the median time of each kind of request in turn, and the ratio to a request without floors."""
    retriever = retriever_of(shop_bundle(labels), spec)
    micros: dict[str, list[float]] = {name: [] for name in _KINDS}
    for number in range(rounds):
        for name, options in _KINDS.items():
            features = {"user_id": f"u{number % 20}"}
            queries = [Query.model_validate({"features": features, "k": 20, "display": False, **options})] * 5
            began = time.process_time()
            for query in queries:
                retriever.retrieve([query])
            micros[name].append((time.process_time() - began) / len(queries) * 1e6)
    for name, of_kind in micros.items():
        ratio = np.median(np.array(of_kind) / np.array(micros["none"]))
        print(f"{name:24} {np.median(of_kind):8.0f} µs, {ratio:.2f} times")
    print(_against_the_cheapest(overlapping))


def _against_the_cheapest(count: int) -> str:
    """Compare the cost of floors that share labels with that of the best list, by integer programming."""
    retriever, rng = retriever_of(shop_bundle(400)), np.random.default_rng(0)
    costs, cheapest = [], []
    for number in range(count):
        query = {"features": {"user_id": f"u{number % 20}"}, "k": 10}
        (whole,) = results_of(retriever.retrieve([Query.model_validate({**query, "k": 400})]))
        floors: list[dict[str, Any]] = [
            {"bucket": str(rng.choice(["torso", "tail"])), "n": 2},
            {"filter": {"brand": f"brand-{rng.integers(7)}"}, "n": 2},
            {"filter": {"tags": f"t{rng.integers(5)}"}, "n": 2},
        ][: int(rng.integers(2, 4))]
        (result,) = results_of(retriever.retrieve([Query.model_validate({**query, "at_least": floors})]))
        scores = np.array([label["score"] for label in whole["labels"]])
        holds = [
            [label["bucket"] == of.get("bucket", label["bucket"]) and meets(label["display"], of.get("filter", {}))
             for label in whole["labels"]]
            for of in floors
        ]  # fmt: skip
        limits = [LinearConstraint(np.ones((1, 400)), 10, 10), LinearConstraint(np.array(holds, float), 2)]
        best = milp(-scores, integrality=1, bounds=Bounds(0, 1), constraints=limits, options={"mip_rel_gap": 0})
        costs.append(result["cost"])
        cheapest.append(scores[:10].sum() + best.fun)
    same = np.mean(np.array(costs) - cheapest < 1e-4)
    means = f"{np.mean(costs):.3f} logits, the cheapest lists {np.mean(cheapest):.3f}"
    return f"floors that share labels: {means}; {same:.1%} cost the same"


if __name__ == "__main__":
    typer.run(main)
