"""Bonuses, slopes and decay, against NumPy from each label's bucket and columns (see also test_all_together.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from longtail import Model
from longtail.bundle import Bonus, Bundle, Patch, Upsert
from longtail.index import Limits
from longtail.index.building.priors import PriorSpec
from longtail.serving import Retriever
from longtail.serving.core.description import release_json
from longtail.serving.core.exploration import Draws, Lottery, explore
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from longtail.serving.errors import InvalidRequestError
from tests.bundles import make_bundle
from tests.serving.core.shop import dated, meets, shop_bundle
from tests.serving.core.test_cooccurrence import AT, Formula, L, changes
from tests.serving.core.test_diversity import greedily, marginally
from tests.serving.plane import make_retriever, read_results

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
BRIGHT = {"colour": {"in": ["red", "blé"]}, "price": {"lt": 2}}
PATCHED = [
    Patch(id="item-9", at=AT, display={"since": "2026-02-27", "price": 0.5, "colour": "red"}),
    Patch(id="item-21", at=AT, display={"since": None, "price": None}),
]


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.serving.core.lifetimes.now", NOW.timestamp)


def weighed(bundle: Bundle) -> Bundle:
    local = PriorSpec(None, {"bright": BRIGHT}, {"since": "12h"}, {"price": Limits(-3, 3)})
    return replace(bundle, priors=local.read(bundle))


@cache
def retriever(spec: str, *, bias: bool = False) -> Retriever:
    bundle = weighed(shop_bundle(L, cooccurrence=True, bias=bias, popularity=bias))
    return make_retriever(bundle, spec, *changes(), *PATCHED)


class Weighed(Formula):
    """The formula with bonus, slope and decay, label by label."""

    def __init__(self, retriever: Retriever) -> None:
        super().__init__(retriever)
        self.priors = None
        columns = retriever.bundle.labels.display
        self.median = float(np.median(columns["price"].drop_null().to_numpy()))
        self.oldest = min(columns["since"].drop_null().to_pylist())

    def scores(self, query: RetrieveQuery, history: list[str]) -> np.ndarray:
        scores = super().scores(query, history)
        for i, displayed in enumerate(self.labels_json):
            columns = displayed["display"]
            scores[i] += query.bonus.get(displayed["bucket"], 0)
            scores[i] += query.bonus.get("bright", 0) * meets(columns, BRIGHT)
            if columns["price"] is not None:
                scores[i] += query.slope.get("price", 0) * (columns["price"] - self.median)
            if query.decay is not None:
                since = date.fromisoformat(columns["since"] or str(self.oldest))
                age = NOW - datetime(since.year, since.month, since.day, tzinfo=UTC)
                half_life = float(query.decay.half_life[:-1])
                scores[i] += query.decay.weight * math.log(2 ** (-age / timedelta(hours=half_life)))
        return scores


def draw_weights(rng: np.random.Generator) -> dict[str, Any]:
    names = ["torso", "tail", "new", "bright"]
    weights: dict[str, Any] = {"bonus": {name: float(rng.uniform(-5, 5)) for name in names if rng.random() < 0.5}}
    if rng.random() < 0.5:
        weights["slope"] = {"price": float(rng.uniform(-3, 3))}
    if rng.random() < 0.5:
        weights["decay"] = {"column": "since", "half_life": f"{rng.integers(24, 2000)}h"}
        weights["decay"]["weight"] = float(rng.uniform(0.1, 2))
    return weights


@pytest.mark.parametrize("spec", ["flat", pytest.param("ivf_flat", marks=pytest.mark.nightly)])
def test_diversity_and_exploration_use_complete_scores(spec: str) -> None:
    served = retriever(spec)
    formula, rng, lottery = Weighed(served), np.random.default_rng(4), Lottery(candidates=12, seed=3)
    history, floors = ["item-3", "item-21", "item-5", "item-8"], {1: 2, 2: 3}
    fixed = {"features": {"user_id": "u1"}, "history": history, "cooccurrence": 1.0}
    fixed |= {"bias_removal": 0.5, "popularity": 0.0}
    for i in range(6):
        max_per, weight = ({"brand": 2}, None) if i % 2 else ({}, 0.4)
        query = RetrieveQuery.model_validate(
            fixed | draw_weights(rng) | {"k": 12, "max_per": max_per, "mmr": weight, "pool": L}
        )
        rows, scores = formula.best(query, history, [])
        (result,) = read_results(served.retrieve([query]))
        chosen = (
            greedily(served, rows, max_per, 12)
            if weight is None
            else marginally(served, rows, scores, weight, max_per, 12)
        )
        assert [served.catalogue.row(label["id"]) for label in result["labels"]] == chosen
        query = RetrieveQuery.model_validate(fixed | draw_weights(rng) | {"k": 10, "explore": {"torso": 2, "tail": 3}})
        draws = Draws(lottery, [f"query {i}"])
        (result,) = read_results(served.retrieve([query], draws))
        rows, scores = formula.best(query, history, [])
        buckets = served.catalogue.buckets(rows)
        ranked = {
            bucket: (rows[buckets == bucket][:22], scores[buckets == bucket][:22].astype(np.float32))
            for bucket in floors
        }
        best = rows[:10], scores[:10].astype(np.float32), buckets[:10]
        expected = explore(best, ranked, floors, lottery, draws.create_generator(0))
        assert [served.catalogue.row(label["id"]) for label in result["labels"]] == expected.rows_K.tolist()
        propensities = [label["propensity"] for label in result["labels"]]
        np.testing.assert_allclose(propensities, expected.propensities_K, rtol=1e-4)
        assert min(propensities) < 1


def test_the_parts_of_a_score_add_up_and_the_answer_names_its_weights() -> None:
    served = retriever("flat", bias=True)
    decay = {"column": "since", "half_life": "7d", "weight": 0.5}
    weights = {"bonus": {"tail": 1.5, "bright": -0.5}, "slope": {"price": -0.02}, "decay": decay}
    query = RetrieveQuery.model_validate({"features": {"user_id": "u3"}, "k": 20, "explain": True} | weights)
    (result,) = read_results(served.retrieve([query]))
    assert result["bonus"] == {"tail": 1.5, "bright": -0.5}
    assert result["slope"] == pytest.approx({"price": -0.02})
    assert result["decay"] == decay
    names = ("taste", "bias", "noise", "popularity", "cooccurrence", "decay")
    tail = 0
    for label in result["labels"]:
        part = label["explanation"]
        total = sum(part[name] for name in names) + sum(part["bonus"].values()) + part["slope"]["price"]
        assert total == pytest.approx(label["score"], abs=1e-4)
        assert part["bonus"]["tail"] == 1.5 * (label["bucket"] == "tail")
        if label["display"]["since"] is not None:
            age = (NOW.replace(tzinfo=None) - datetime.fromisoformat(label["display"]["since"])) / timedelta(days=7)
            assert part["decay"] == pytest.approx(-0.5 * math.log(2) * age, rel=1e-5)
        tail += label["bucket"] == "tail"
    assert tail > 10
    (plain,) = read_results(served.retrieve([RetrieveQuery(features={"user_id": "u1"})]))
    assert {"bonus", "slope", "decay", "priors"}.isdisjoint(plain)


def test_defaults_are_the_bundles_and_promises_hold_at_them_alone() -> None:
    bundle = shop_bundle(L)
    bonus = bundle.manifest.bonus | {"tail": Bonus(default=1.5)}
    bundle = weighed(replace(bundle, manifest=bundle.manifest.model_copy(update={"bonus": bonus})))
    served = make_retriever(bundle, "flat")
    (result,) = read_results(served.retrieve([RetrieveQuery(features={"user_id": "u1"})]))
    assert result["bonus"] == {"tail": 1.5}
    (near,) = read_results(served.similar([SimilarQuery(id="item-1")]))
    assert "bonus" not in near
    assert release_json(served)["bonus"]["tail"] == {
        "minimum": -5.0, "default": 1.5, "maximum": 5.0, "filter": {}}  # fmt: skip
    assert release_json(served)["decay"] == {"since": {"half_life": "12h"}}
    options = ({}, {"bonus": {"tail": 1.5}}, {"bonus": {"tail": 1}}, {"slope": {"price": 1}}, {"decay": {
        "column": "since", "half_life": "7d"}})  # fmt: skip
    retrieval = served.retrieve(
        [
            RetrieveQuery.model_validate({"features": {"user_id": "u1"}, "bias_removal": 0.5} | first)
            for first in options
        ]
    )
    assert retrieval.judged_at_B.tolist()[:2] == [0.5, 0.5]
    assert np.isnan(retrieval.judged_at_B[2:]).all()
    for weights, judged in zip(
        [query.weights.signed for query in retrieval.queries], retrieval.judged_at_B, strict=True
    ):
        np.testing.assert_equal(served.find_judged_dial(0.5, 0.0, 0.0, weights), judged)
    # Answers near a label give the tail no bonus, so they are not those that the promise is of.
    assert len(served.similar([SimilarQuery(id="item-1")]).queries[0].weights.signed) == len(bundle.priors.settings)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"bonus": {"head": 1}}, "bonus", r"received \"head\": the others are measured against it, so"),
        ({"bonus": {"tial": 1}}, "bonus", r"'new', 'bright'\], received \"tial\": did you mean 'tail'"),
        ({"bonus": {"tail": 6}}, "bonus.tail", "expected -5.0 <= bonus.tail <= 5.0, received 6.0"),
        ({"slope": {"stock": 1}}, "slope", r"\['price'\], received \"stock\"; longtail-index build --priors declares"),
        ({"decay": {"column": "at", "half_life": "7d"}}, "decay.column", r"\['since'\], received \"at\""),
        ({"decay": {"column": "since", "half_life": "7"}}, "decay.half_life", "expected a span such as '90m'"),
        ({"decay": {"column": "since", "half_life": "11h"}}, "decay.half_life", r"at least 12h at weight 1, received"),
        ({"decay": {"column": "since", "half_life": "23h", "weight": 2}}, "decay.half_life", "at least 24h at weight"),
    ],
)  # fmt: skip
def test_weights_that_the_release_does_not_have(body: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        retriever("flat").retrieve([RetrieveQuery.model_validate({"features": {}} | body)])
    assert raised.value.field == f"queries.0.{field}"


def test_limits_below_zero_hold_both_ends() -> None:
    bundle = shop_bundle(L)
    local = PriorSpec(slopes={"price": Limits(-3, -1, -2)})
    served = make_retriever(replace(bundle, priors=local.read(bundle)), "flat")
    for weight in (-3, -1):
        (result,) = read_results(served.retrieve([RetrieveQuery(features={"user_id": "u1"}, slope={"price": weight})]))
        assert result["slope"] == {"price": weight}
    with pytest.raises(InvalidRequestError, match=r"expected -3\.0 <= slope\.price <= -1\.0, received -0\.9"):
        served.retrieve([RetrieveQuery(features={"user_id": "u1"}, slope={"price": -0.9})])


def test_queries_whose_answers_follow_from_columns() -> None:
    """Off-policy estimates leave out their answers from before a patch of a label."""
    of_columns = [{"bonus": {"bright": 1}}, {"slope": {"price": 1}}, {"decay": {"column": "since", "half_life": "9d"}}]
    of_columns += [
        {"filter": {"price": 1}},
        {"at_least": [{"filter": {"price": 1}, "n": 1}]},
        {"max_per": {"brand": 1}},
    ]
    for options in of_columns:
        assert retriever("flat").reads_columns(RetrieveQuery.model_validate({"features": {}, **options}))
    for options in ({}, {"bonus": {"tail": 1}}, {"at_least": [{"bucket": "tail", "n": 1}]}):
        assert not retriever("flat").reads_columns(RetrieveQuery.model_validate({"features": {}, **options}))
    local, bundle = PriorSpec(slopes={"price": Limits(-3, -1, -2)}), shop_bundle(L)
    served = make_retriever(replace(bundle, priors=local.read(bundle)), "flat")
    assert served.reads_columns(RetrieveQuery(features={}))
    assert make_retriever(dated(bundle), "flat").reads_columns(RetrieveQuery(features={}))


def test_a_minute_counts_in_ten_years() -> None:
    labels, newest = 64, datetime(2026, 3, 1)
    times = [newest - timedelta(minutes=row) for row in range(32)] + [newest - timedelta(days=3650)] * 32
    bundle = make_bundle(labels=labels)
    bundle = replace(
        bundle,
        embeddings=np.tile(bundle.embeddings[:1], (labels, 1)),
        labels=replace(bundle.labels, display=pa.table({"at": pa.array(times, pa.timestamp("us"))})),
        manifest=bundle.manifest.model_copy(update={"display": ["at"]}),
    )
    bundle = replace(bundle, priors=PriorSpec(decay={"at": "1d"}).read(bundle))
    decay = {"column": "at", "half_life": "30d"}
    query = {"features": {"user_id": "u1"}, "k": 32, "bias_removal": 0, "popularity": 0, "decay": decay}
    (result,) = read_results(make_retriever(bundle, "flat").retrieve([RetrieveQuery.model_validate(query)]))
    assert [label["id"] for label in result["labels"]] == [f"item-{row}" for row in range(32)]
    days = bundle.priors.values_LP[:, -1].astype(np.float64)
    assert np.abs(days[:32] * 86_400 + 60 * np.arange(32)).max() < 1e-3
    assert np.abs(days[32:] + 3650).max() * 86_400 < 22


def test_a_model_in_python_takes_bonus_and_decay(tmp_path: Path) -> None:
    model = Model(shop_bundle().write(tmp_path / "bundle"))

    def rows(**options: Any) -> list[dict[str, Any]]:
        answer = model.recommend({"user_id": "u1"}, k=5, **options)
        rows: list[dict[str, Any]] = answer.to_pylist() if isinstance(answer, pa.Table) else answer.to_dict("records")
        return rows

    assert {row["bucket"] for row in rows(bonus={"tail": 5})} == {"tail"}
    newest = [str(row["since"])[:10] for row in rows(decay={"column": "since", "half_life": "1h"})]
    assert set(newest) == {"2026-02-09"}


def test_columns_that_an_upsert_cannot_have() -> None:
    served = retriever("flat")
    record = Upsert(id="far", at=AT, features={"genres": ["g1"]}, display={"price": 3e38})
    with pytest.raises(InvalidRequestError, match="expected a number from") as raised:
        served.overlay.check([record])
    assert raised.value.field == "labels.0.display.price"
