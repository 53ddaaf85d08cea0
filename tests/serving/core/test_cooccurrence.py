"""The term ω·c in a request, against `s = u·v/T + b + λ·log ν + μ·log π + Σ w·r + ω·c` of every label by NumPy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longtail.bundle import Bundle, Hide, LabelRecord, Prior, Priors, Upsert
from longtail.serving import Retriever, create_app
from longtail.serving.core.description import release_json
from longtail.serving.core.queries import RetrieveQuery, SimilarQuery
from longtail.serving.errors import InvalidRequestError, UnservableReleaseError
from longtail.serving.http.schemas.operations import ReleaseAnswer
from longtail.serving.http.schemas.retrieval import RetrieveAnswer
from tests.bundles import make_bundle
from tests.serving.client import open_client
from tests.serving.core.shop import draw_filter, meets, shop_bundle
from tests.serving.http.test_feedback import recorded_events
from tests.serving.plane import make_retriever, plane_settings, read_results

AT = datetime(2026, 5, 1, tzinfo=UTC)
L = 400
RECENT = Prior(name="recent", minimum=-1, default=0.25, maximum=2, missing=-3, kappa=0.7)


def add_priors(bundle: Bundle) -> Bundle:
    values = np.random.default_rng(5).normal(0, 2, (bundle.manifest.labels, 1)).astype(np.float32)
    return replace(bundle, priors=Priors((RECENT,), values))


def changes() -> list[LabelRecord]:
    """30 labels hidden, 15 embedded again, 15 added."""
    displayed = {"brand": "brand-new", "tags": ["t1", "fresh"], "price": 0.25}
    records: list[LabelRecord] = [Hide(id=f"item-{row}", at=AT) for row in range(0, 300, 10)]
    for row in range(1, 300, 20):
        features = {"genres": [f"g{row % 5}"]}
        records += [
            Upsert(id=id_, at=AT, features=features, display=displayed) for id_ in (f"item-{row}", f"new-{row}")
        ]
    return records


BUNDLES = {
    "cosine": lambda: shop_bundle(L, cooccurrence=True),
    "dot, bias, μ": lambda: shop_bundle(L, cooccurrence=True, cosine=False, bias=True, popularity=True),
    "priors": lambda: add_priors(shop_bundle(L, cooccurrence=True, bias=True)),
    "tree": lambda: add_priors(make_bundle(labels=L, cooccurrence=True, bias=True, proposal=True)),
}
CASES = [
    ("cosine", "flat", [], 1024),
    ("cosine", "ivf_flat", [], 1024),
    ("dot, bias, μ", "flat", changes(), 8),
    ("dot, bias, μ", "ivf_flat", changes(), 16),
    ("priors", "flat", changes(), 1024),
    ("tree", "flat", [], 1024),
]
"""Bundle, index, changes, and how many added labels share one block of columns for filters."""


class Formula:
    """Scores every label that a retriever may answer, in float64, from the bundle and the overlay's rows alone."""

    def __init__(self, retriever: Retriever) -> None:
        self.retriever, bundle, overlay = retriever, retriever.bundle, retriever.overlay
        self.bundle, added = bundle, overlay.added
        rows = [row for row in range(overlay.labels) if row not in overlay.masked.tolist()]
        self.rows, self.ids = rows, [retriever.catalogue.get_id(row) for row in rows]
        self.labels_json = retriever.catalogue.labels_json(rows)

        def column(of_bundle: Any, of_added: Any) -> np.ndarray:
            values = np.concatenate([of_bundle, of_added]) if len(added) else np.asarray(of_bundle)
            return values[rows].astype(np.float64)

        zeros = np.zeros(overlay.labels)
        labels = bundle.labels
        self.vectors = column(bundle.embeddings, added.embeddings)
        self.log_nu = column(labels.log_pn, added.log_pn)
        self.log_pi = self.log_nu if labels.log_popularity is None else column(labels.log_pi, added.log_popularity)
        self.bias = zeros[rows] if labels.bias is None else column(labels.bias, added.bias)
        self.priors = None if not bundle.priors.settings else column(bundle.priors.values_LP, added.priors)[:, 0]
        together = bundle.cooccurrence
        assert together is not None
        self.weights = np.zeros((L, L))
        for row in range(L):
            for other, weight in zip(together.rows_LN[row].tolist(), together.weights_LN[row].tolist(), strict=True):
                if other >= 0:
                    self.weights[row, other] = weight

    def together(self, history: list[str]) -> np.ndarray:
        """c of every label: the last 5 entries, each .8 of the one after it; labels by their ids, added ones 0."""
        row_of = {f"item-{row}": row for row in range(L)}
        entries = [row_of[id_] for id_ in history[-5:] if id_ in row_of]
        c = np.zeros(len(self.ids))
        for age, entry in enumerate(reversed(entries)):
            c += 0.8**age * np.array([self.weights[entry, row_of[id_]] if id_ in row_of else 0 for id_ in self.ids])
        return c

    def scores(self, query: RetrieveQuery, history: list[str]) -> np.ndarray:
        bundle, encoder = self.bundle, self.retriever.encoder
        inputs = encoder.read([query.features or {}])
        vector = np.array(query.vector) if query.vector is not None else encoder.embed(inputs)[0].astype(np.float64)
        log_nu = self.log_nu
        if query.vector is not None and bundle.manifest.similarity == "cosine":
            vector = vector / np.linalg.norm(vector)
        if bundle.proposal is not None and query.vector is None:
            log_nu = bundle.proposal.all_log_probabilities(bundle.proposal.project(inputs))[0][self.rows]
        assert query.bias_removal is not None
        assert query.popularity is not None
        weight = 0.5 if query.cooccurrence is None else query.cooccurrence
        if query.vector is None and not any(inputs[name].any() for name in ("user_id", "history")):
            scores = self.log_pi.copy()  # the towers know nothing
            weight = weight and 2.0  # 3, but no more than the maximum
        else:
            scores = self.vectors @ vector / bundle.manifest.temperature + self.bias
            scores += query.bias_removal * log_nu + query.popularity * self.log_pi
        if self.priors is not None:
            scores += query.priors.get("recent", 0.25) * self.priors
        return scores + weight * self.together(history)

    def basis(self, query: RetrieveQuery, history: list[str]) -> str:
        """What the answer stands on."""
        if query.vector is not None or self.retriever.encoder.read([query.features or {}])["user_id"][0]:
            return "model"
        if self.retriever.encoder.read([query.features or {}])["history"].any():
            return "model"
        return "cooccurrence" if query.cooccurrence != 0 and self.together(history).any() else "popularity"

    def best(self, query: RetrieveQuery, history: list[str], left_out: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Rows and scores of every eligible label, best first."""
        scores, out = self.scores(query, history), {*map(str, query.exclude), *left_out}
        passes = [
            i
            for i, (id_, displayed) in enumerate(zip(self.ids, self.labels_json, strict=True))
            if id_ not in out
            and (query.allow is None or id_ in query.allow)
            and (query.buckets is None or displayed["bucket"] in query.buckets)
            and meets(displayed["display"], query.filter)
        ]
        order = np.array(passes, int)[np.argsort(-scores[passes], kind="stable")]
        return np.array(self.rows)[order], scores[order]


def draw_query(rng: np.random.Generator, name: str, bundle: Bundle) -> tuple[RetrieveQuery, list[str], list[str]]:
    """A random query with the history that counts and the labels that it leaves out."""
    user = int(rng.integers(20))
    request: dict[str, Any] = {"features": {"user_id": f"u{user}"}, "k": int(rng.integers(1, 60))}
    request["bias_removal"] = float(rng.choice([0, 0.5, 1.0]))
    request["popularity"] = float(rng.choice([-0.5, 0, 0.5]))
    if rng.random() < 0.8:
        request["cooccurrence"] = float(rng.choice([0, 0.01, 0.5, 2.0]))
    ids = [*(f"item-{row}" for row in range(L)), *(f"new-{row}" for row in range(1, 300, 20)), "no such item"]
    history = [ids[i] for i in rng.integers(0, len(ids), rng.integers(0, 12))]
    history = history[:3] + history[:1] + history[3:]  # a repeated entry
    kind = rng.choice(["feature", "own", "remembered", "vector", "none", "stranger"])
    if kind == "feature":
        request["features"]["history"] = history
    elif kind == "own":
        request["history"] = history
    elif kind == "stranger":
        request |= {"features": {"user_id": "nobody"}, "history": history}
    elif kind == "vector" and name != "tree":
        request |= {"features": None, "vector": rng.normal(size=8).tolist(), "history": history}
    elif kind == "remembered":
        history = remembered(bundle, user)
    else:
        request["features"], history = {}, []
    if rng.random() < 0.5:
        request["exclude_history"] = bool(rng.random() < 0.7)
    if rng.random() < 0.3 and name != "tree":
        request["filter"] = draw_filter(rng)
    if rng.random() < 0.4:
        request["exclude"] = [ids[i] for i in rng.choice(len(ids), rng.integers(1, 300))]
    if rng.random() < 0.2:
        request["allow"] = [ids[i] for i in rng.choice(len(ids), rng.integers(1, 300))]
    if rng.random() < 0.3:
        request["buckets"] = ["torso", "tail"]
    if "recent" in bundle.priors.names and rng.random() < 0.5:
        request["priors"] = {"recent": float(rng.uniform(-1, 2))}
    return RetrieveQuery(**request), history, history if request.get("exclude_history") else []


def remembered(bundle: Bundle, user: int) -> list[str]:
    assert bundle.remembered is not None
    return [f"item-{row}" for row in bundle.remembered.rows_QR[user + 1].tolist() if row >= 0]


@pytest.mark.parametrize(("name", "spec", "records", "block"), CASES, ids=[f"{of[0]}, {of[1]}" for of in CASES])
def test_answers_follow_the_formula(
    name: str, spec: str, records: list[LabelRecord], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longtail.serving.core.attributes._BLOCK", block)
    bundle = BUNDLES[name]()
    retriever = make_retriever(bundle, spec, *records)
    formula, rng = Formula(retriever), np.random.default_rng(7)
    drawn = [draw_query(rng, name, bundle) for _ in range(150)]
    results = read_results(retriever.retrieve([query for query, _, _ in drawn]))
    moved, bases = 0, Counter[str]()
    for (query, history, left_out), result in zip(drawn, results, strict=True):
        rows, scores = formula.best(query, history, left_out)
        answered_scores = [label["score"] for label in result["labels"]]
        bases[result["basis"]] += 1
        assert result["basis"] == formula.basis(query, history)
        assert len(answered_scores) == min(query.k, len(rows))
        scale = max(1.0, np.abs(formula.scores(query, history)).max())
        np.testing.assert_allclose(answered_scores, scores[: query.k], rtol=0, atol=3e-6 * scale)
        of_row = dict(zip(rows.tolist(), scores, strict=True))
        answered = [retriever.catalogue.row(label["id"]) for label in result["labels"]]
        assert len(set(answered)) == len(answered)
        np.testing.assert_allclose([of_row[row] for row in answered], answered_scores, rtol=0, atol=3e-6 * scale)
        without, _ = formula.best(query.model_copy(update={"cooccurrence": 0.0}), history, left_out)
        moved += without[: query.k].tolist() != rows[: query.k].tolist()
    assert min(bases[basis] for basis in ("model", "cooccurrence", "popularity")) > 5
    assert moved > len(drawn) / 4, "the term changes too few answers for the test to say anything"


def test_sources_of_a_history_in_their_order() -> None:
    bundle = make_bundle(labels=60, cooccurrence=True)
    retriever = make_retriever(bundle, "flat")
    stored = remembered(bundle, 3)
    assert len(stored) == 4

    def answered(**request: Any) -> tuple[dict[str, float], int]:
        (result,) = read_results(retriever.retrieve([RetrieveQuery(**{"k": 60, "bias_removal": 0.0, **request})]))
        return {label["id"]: round(float(label["score"]), 4) for label in result["labels"]}, result["unknown"][
            "history"
        ]

    alone = {"user_id": "u3"}
    by_own, unknown = answered(features=alone, history=stored)
    assert unknown == 0
    assert answered(features=alone) == (by_own, 0)
    assert answered(features=alone, history=[]) == answered(features=alone, cooccurrence=0.0)
    assert answered(features=alone, history=[]) != answered(features=alone)
    # A feature of kind `history` comes first; nothing is remembered of a query that gives an empty one.
    assert answered(features=alone | {"history": []}) == answered(features=alone, history=[])
    assert answered(features=alone | {"history": None}) == answered(features=alone)
    assert answered(features={"user_id": "nobody"}) == answered(features={"user_id": "nobody"}, history=[])
    # Integers are ids, unknown ids are counted among the last five, and all of those that are left out.
    longer = ["never", "item-9", *stored, 17]
    assert answered(features=alone, history=longer)[1] == 1
    assert answered(features=alone, history=longer, exclude_history=True)[1] == 2
    left_out, _ = answered(features=alone, exclude_history=True)
    assert left_out.keys() == by_own.keys() - {*stored}
    with pytest.raises(InvalidRequestError, match="expected history or a feature of kind history, one of") as raised:
        retriever.retrieve(
            [RetrieveQuery(features=alone), RetrieveQuery(features=alone | {"history": ["item-1"]}, history=["item-2"])]
        )
    assert raised.value.field == "queries.1.history"


def renamed(bundle: Bundle) -> Bundle:
    """The bundle, which remembers queries by `customer` instead of a feature of its tower."""
    assert bundle.cooccurrence is not None
    settings = bundle.cooccurrence.settings
    settings = settings.model_copy(update={"log": settings.log.model_copy(update={"query_id": "customer"})})
    manifest = bundle.manifest.model_copy(update={"cooccurrence": settings})
    return replace(bundle, manifest=manifest, cooccurrence=replace(bundle.cooccurrence, settings=settings))


def test_a_name_that_the_tower_does_not_read_names_the_query() -> None:
    bundle = make_bundle(labels=60, cooccurrence=True)
    bundle = renamed(bundle)
    retriever = make_retriever(bundle, "flat")

    def scores(**request: Any) -> list[tuple[str, float]]:
        (result,) = read_results(retriever.retrieve([RetrieveQuery(**request)]))
        return [(label["id"], float(label["score"])) for label in result["labels"]]

    stored = remembered(bundle, 3)
    named = scores(features={"customer": "u3", "user_id": "u5"})
    assert named == scores(features={"user_id": "u5"}, history=stored)
    assert named != scores(features={"user_id": "u5"})
    with pytest.raises(InvalidRequestError, match=r"expected an id, received a list of 1") as raised:
        retriever.retrieve([RetrieveQuery(features={"customer": ["u3"]})])
    assert raised.value.field == "queries.0.features.customer"
    assert release_json(retriever)["cooccurrence"]["query_id"] == "customer"
    assert release_json(retriever)["example"]["customer"] == "u0"


def test_queries_with_and_without_history_share_a_batch() -> None:
    retriever = make_retriever(make_bundle(labels=300, cooccurrence=True), "flat")
    queries = [RetrieveQuery(features={}, k=5), RetrieveQuery(features={}, k=200, history=["item-3"])]
    alone = [read_results(retriever.retrieve([query]))[0]["labels"] for query in queries]
    assert [result["labels"] for result in read_results(retriever.retrieve(queries))] == alone


def test_a_release_without_the_term_excludes_a_history() -> None:
    retriever = make_retriever(make_bundle(labels=60), "flat")
    (result,) = read_results(
        retriever.retrieve([RetrieveQuery(features={}, history=["item-1"], k=60, exclude_history=True)])
    )
    assert {label["id"] for label in result["labels"]} == {f"item-{row}" for row in range(60) if row != 1}
    assert "cooccurrence" not in result
    (result,) = read_results(retriever.retrieve([RetrieveQuery(features={}, cooccurrence=0.0)]))
    assert len(result["labels"]) == 10
    assert release_json(retriever)["cooccurrence"] is None


@pytest.mark.parametrize("weight", [-0.1, 2.5])
def test_limits_of_the_dial(weight: float) -> None:
    retriever = make_retriever(make_bundle(labels=60, cooccurrence=True), "flat")
    with pytest.raises(InvalidRequestError, match=f"expected 0.0 <= cooccurrence <= 2.0, received {weight}"):
        retriever.retrieve([RetrieveQuery(features={}, cooccurrence=weight)])
    assert release_json(retriever)["cooccurrence"] == {
        "default": 0.5, "minimum": 0.0, "maximum": 2.0, "kind": "walk", "last": 5, "decay": 0.8, "query_id": "user_id"
    }  # fmt: skip


def test_similar_labels_by_cooccurrence() -> None:
    bundle = shop_bundle(L, cooccurrence=True)
    retriever = make_retriever(bundle, "flat", *changes())
    formula = Formula(retriever)
    for id_ in ("item-3", "item-21", "item-6", "new-21"):
        request = SimilarQuery(id=id_, by="cooccurrence", k=20, exclude=["item-7"], filter={"price": {"exists": True}})
        (result,) = read_results(retriever.similar([request]))
        c = formula.together([id_])
        expected = {
            label["id"]: weight
            for label, weight in zip(formula.labels_json, c.tolist(), strict=True)
            if weight > 0 and label["id"] not in ("item-7", id_) and label["display"]["price"] is not None
        }
        assert {label["id"]: label["score"] for label in result["labels"]} == pytest.approx(expected, rel=1e-6)
        scores = [label["score"] for label in result["labels"]]
        assert scores == sorted(scores, reverse=True)
        assert (result["bias_removal"], result["popularity"], result["cooccurrence"]) == (0.0, 0.0, 1.0)
        assert bool(scores) == (id_ in ("item-3", "item-21"))

        plain, both = read_results(
            retriever.similar([SimilarQuery(id=id_, k=L), SimilarQuery(id=id_, k=L, cooccurrence=1.5)])
        )
        near = {label["id"]: float(label["score"]) for label in plain["labels"]}
        added = dict(zip(formula.ids, c.tolist(), strict=True))
        assert {label["id"]: label["score"] for label in both["labels"]} == pytest.approx(
            {id_: score + 1.5 * added[id_] for id_, score in near.items()}, abs=1e-4
        )
        assert plain["cooccurrence"] == 0.0
    mixed = read_results(
        retriever.similar([SimilarQuery(id="item-3", by="cooccurrence", k=3), SimilarQuery(id="item-3", k=3)])
    )
    assert mixed[1]["labels"][0]["score"] == max(score_neighbours(retriever).values())


def score_neighbours(retriever: Retriever) -> dict[str, float]:
    (result,) = read_results(retriever.similar([SimilarQuery(id="item-3", k=L)]))
    return {label["id"]: label["score"] for label in result["labels"]}


def test_similar_by_cooccurrence_of_a_release_without_it() -> None:
    retriever = make_retriever(make_bundle(labels=60), "flat")
    message = "expected by: embedding, as this release knows nothing of what was chosen together"
    with pytest.raises(InvalidRequestError, match=message) as raised:
        retriever.similar([SimilarQuery(id="item-1", by="cooccurrence")])
    assert raised.value.field == "by"


@pytest.mark.parametrize("name", list(BUNDLES))
def test_an_explanation_adds_up_and_names_the_entries_behind_it(name: str) -> None:
    retriever = make_retriever(BUNDLES[name](), "flat", *([] if name == "tree" else changes()))
    formula = Formula(retriever)
    history = ["item-9", "item-3", "no such item", "item-21", "new-21", "item-10", "item-5"]
    query = RetrieveQuery(
        features={"user_id": "u3"}, history=history, k=20, cooccurrence=2.0, explain=True, exclude_history=False,
        bias_removal=0.5, popularity=0.0,
    )  # fmt: skip
    (result,) = read_results(retriever.retrieve([query]))
    last = [("item-21", 0.8**2), ("item-10", 0.8), ("item-5", 1.0)]  # of the last five, those that W knows
    visited = 0
    for label in result["labels"]:
        part = label["explanation"]
        parts = [part[item] for item in ("taste", "bias", "noise", "popularity", "cooccurrence")]
        assert sum(parts) + sum(part.get("priors", {}).values()) == pytest.approx(label["score"], abs=1e-4)
        row = retriever.catalogue.row_of.get(label["id"])
        weights = {id_: factor * (0 if row is None else formula.weights[int(id_[5:]), row]) for id_, factor in last}
        c = sum(weights.values())
        assert part["cooccurrence"] == pytest.approx(2 * c, rel=1e-5)
        expected = sorted(((id_, w / c) for id_, w in weights.items() if w), key=lambda first: -first[1])
        assert [item["id"] for item in part["because"]] == [id_ for id_, _ in expected]
        assert [item["share"] for item in part["because"]] == pytest.approx([share for _, share in expected])
        visited += bool(expected)
    assert visited >= 3


def test_over_http(tmp_path: Path) -> None:
    retriever = make_retriever(shop_bundle(L, cooccurrence=True), "flat")
    formula = Formula(retriever)
    app = create_app(plane_settings(tmp_path, answer_share=1, max_body_bytes=1 << 20), retriever=retriever)
    history = ["item-3", "nothing", "item-21", 5]
    dials = {"bias_removal": 0.5, "popularity": 0.0, "cooccurrence": 1.5}
    body = {"features": {"user_id": "u3"}, "history": history, "k": 5, "explain": True, "display": False} | dials
    with open_client(app) as client:
        answer = client.post("/v1/retrieve", json={"queries": [body]})
        RetrieveAnswer.model_validate_json(answer.content, strict=True)
        ReleaseAnswer.model_validate_json(client.get("/v1/release").content)
        (result,) = answer.json()["results"]
        rows, scores = formula.best(
            RetrieveQuery(features={"user_id": "u3"}, **dials), ["item-3", "nothing", "item-21", "5"], []
        )
        assert [label["id"] for label in result["labels"]] == [f"item-{row}" for row in rows[:5]]
        assert [label["score"] for label in result["labels"]] == pytest.approx(scores[:5], rel=1e-5)
        assert (result["cooccurrence"], result["unknown"]) == (
            1.5,
            {"query": 0, "history": 2, "exclude": 0, "allow": 0},
        )
        together = {first["id"] for label in result["labels"] for first in label["explanation"]["because"]}
        assert together <= {"item-3", "item-21"}
        assert together

        longest = body | {"history": [f"item-{row % L}" for row in range(10_000)], "explain": False}
        (by_last,) = client.post("/v1/retrieve", json={"queries": [longest]}).json()["results"]
        last = body | {"history": [f"item-{row % L}" for row in range(9_995, 10_000)], "explain": False}
        (expected,) = client.post("/v1/retrieve", json={"queries": [last]}).json()["results"]
        assert by_last["labels"] == expected["labels"]

        near = client.post("/v1/similar", json={"id": "item-3", "by": "cooccurrence", "k": 3, "display": False})
        c = formula.together(["item-3"])
        assert [label["score"] for label in near.json()["results"][0]["labels"]] == pytest.approx(-np.sort(-c)[:3])
        wrong = client.post("/v1/similar", json={"id": "item-3", "by": "cooccurrence", "bias_removal": 0.5})
        assert wrong.status_code == 422
        message = "expected no bias_removal with by: cooccurrence, which alone ranks, received one"
        assert wrong.json()["error"]["message"] == message

        chosen = {"answer_id": result["answer_id"], "labels": ["item-3"]}
        organic = {"labels": ["item-3"], "features": {"user_id": "u3"}, "history": ["item-5"], "cooccurrence": 0.25}
        assert client.post("/v1/feedback", json={"events": [chosen, organic]}).status_code == 200
    assert recorded_events(tmp_path, "answer")[0]["cooccurrence"] == 1.5
    assert recorded_events(tmp_path, "choice")[0]["cooccurrence"] == 1.5
    assert recorded_events(tmp_path, "organic")[0]["cooccurrence"] == 0.25


def test_a_release_that_would_refuse_what_clients_send_is_not_served(tmp_path: Path) -> None:
    before = make_retriever(renamed(make_bundle(labels=60, cooccurrence=True)).write(tmp_path / "bundle"), "flat")
    after = make_retriever(make_bundle(labels=60), "flat")
    lost = "query id 'customer': expected as in the published release, .*; cooccurrence: expected as in the published"
    with pytest.raises(UnservableReleaseError, match=lost):
        after.check_compatible(before)
    before.check_compatible(after)
    before.check_compatible(before)
