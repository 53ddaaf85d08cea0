"""Queries for a label against NumPy's softmax over all labels, at random releases, filters and exclusions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, json

from longtail.bundle import Bundle, Hide, Upsert
from longtail.bundle.histories import to_refusals
from longtail.index import (
    KnownQueries,
    NotPublishableError,
    PriorTable,
    QueriesError,
    ReleaseCorruptError,
    build,
    open_releases,
    refresh,
    refresh_priors,
)
from longtail.index.building.priors import Limits
from longtail.index.building.queries import log_normalisers
from longtail.model import Model
from longtail.serving import create_app
from longtail.serving.campaign import campaign, invert
from longtail.serving.core.known_queries import find_known_queries
from longtail.serving.core.loader import load_release
from longtail.serving.core.queries import QueriesFor, QueryFeatures
from longtail.serving.core.retriever import Retriever
from longtail.serving.errors import InvalidRequestError, NoQueriesError, ServingError, UnservableReleaseError
from tests.bundles import label_features, make_bundle
from tests.serving.client import open_client
from tests.serving.plane import plane_settings

LABELS, USERS = 40, 60


@dataclass
class QueriesCase:
    """A release with an index of queries, and what NumPy computes from its bundle."""

    retriever: Retriever
    vectors_QD: np.ndarray
    countries: list[str]
    choices_Q: np.ndarray
    folder: Path
    weights: float = 0.5

    @property
    def bundle(self) -> Bundle:
        return self.retriever.bundle

    def scores(self, bias_removal: float) -> np.ndarray:
        """s of every query and label, float64 [Q, L]."""
        labels, manifest = self.bundle.labels, self.bundle.manifest
        scores_QL = self.vectors_QD.astype(np.float64) @ self.bundle.embeddings.T / manifest.temperature
        scores_QL += bias_removal * labels.log_pn + manifest.popularity.default * labels.log_pi
        if self.bundle.priors.from_table:
            scores_QL += self.weights * self.bundle.priors.values_LP[:, 0]
        return scores_QL if labels.bias is None else scores_QL + labels.bias

    def histories(self) -> list[list[int]]:
        assert self.bundle.remembered is not None
        return [self.bundle.remembered.history(f"u{user}").tolist() for user in range(USERS)]

    def refused(self) -> list[list[int]]:
        if self.bundle.remembered is None:
            return [[] for _ in range(USERS)]
        return [self.bundle.remembered.refused(f"u{user}").tolist() for user in range(USERS)]


def add_refusals(bundle: Bundle) -> Bundle:
    """Turn a third of what queries remember into labels that they said no to, some of them chosen before or again."""
    assert bundle.remembered is not None
    assert bundle.cooccurrence is not None
    rng, rows_QR = np.random.default_rng(5), bundle.remembered.rows_QR.copy()
    rows_QR[::2] = np.where(rows_QR[::2] < 0, rows_QR[::2], rows_QR[::2] % 4)
    rows_QR = np.where((rows_QR >= 0) & (rng.random(rows_QR.shape) < 1 / 3), to_refusals(rows_QR), rows_QR)
    settings = bundle.cooccurrence.settings
    log = settings.log.model_copy(update={"event": "event", "weights": {"buy": 1.0}, "negative": ["return"]})
    settings = settings.model_copy(update={"log": log})
    return replace(
        bundle,
        manifest=bundle.manifest.model_copy(update={"cooccurrence": settings}),
        cooccurrence=replace(bundle.cooccurrence, settings=settings),
        remembered=replace(bundle.remembered, rows_QR=rows_QR.astype(np.int32)),
    )


def make_case(folder: Path, *, priors: bool = False, **options: Any) -> QueriesCase:
    rng = np.random.default_rng(7)
    bundle = make_bundle(labels=LABELS, users=USERS, label_tower=True, queries=10, **options)
    bundle = bundle if bundle.remembered is None else add_refusals(bundle)
    countries = rng.choice(["AT", "DE", "FR"], USERS).tolist()
    histories = [[f"item-{row}" for row in rng.integers(0, LABELS, 3)] for _ in range(USERS)]
    table = pa.table({"user_id": [f"u{user}" for user in range(USERS)], "history": histories, "country": countries})
    choices_Q = rng.integers(0, 40, USERS)
    pq.write_table(table.append_column("count", pa.array(choices_Q)), folder / "users.parquet")
    inputs = None
    if priors:
        values = pa.table({"label_id": bundle.labels.ids, "margin": rng.standard_normal(LABELS)})
        pq.write_table(values, folder / "priors.parquet")
        inputs = PriorTable(folder / "priors.parquet", {"margin": Limits(-1, 1, 0.5)})
    written = bundle.write(folder / "bundle")
    source = None if bundle.remembered is not None else "user_id"
    build(
        written,
        folder / "releases",
        name="one",
        priors=inputs,
        queries=KnownQueries(folder / "users.parquet", source, "count"),
    )
    retriever = load_release(open_releases(folder / "releases"), "one", max_new_labels=10)
    rows = [QueryFeatures(features=row) for row in table.select(["user_id", "history"]).to_pylist()]
    vectors = retriever.embed(rows)
    return QueriesCase(retriever, np.stack(vectors), countries, choices_Q, folder)


@pytest.fixture(scope="module", params=["plain", "bias and priors", "popularity and histories"])
def random_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QueriesCase:
    folder = tmp_path_factory.mktemp("queries")
    match request.param:
        case "plain":
            return make_case(folder, cosine=False, seed=1)
        case "bias and priors":
            return make_case(folder, bias=True, priors=True, seed=2)
    return make_case(folder, popularity=True, cooccurrence=True, seed=3)


def test_answers_equal_the_exact_softmax(random_case: QueriesCase) -> None:
    rng, bundle = np.random.default_rng(0), random_case.bundle
    for bias_removal in (0.0, 0.5, 1.0):
        scores_QL = random_case.scores(bias_removal)
        log_p_QL = scores_QL - np.logaddexp.reduce(scores_QL, axis=1, keepdims=True)
        for row in rng.permutation(LABELS)[:12].tolist():
            label = bundle.labels.ids[row].as_py()
            excluded, country = rng.permutation(USERS)[:20].tolist(), str(rng.choice(["AT", "DE", "FR"]))
            chose = [row in history for history in random_case.histories()] if bundle.remembered else [False] * USERS
            all_queries = [query for query, refused in enumerate(random_case.refused()) if row not in refused]
            for options, eligible in [
                ({}, all_queries),
                ({"filter": {"country": country}}, [q for q in all_queries if random_case.countries[q] == country]),
                ({"exclude": [f"u{query}" for query in excluded] + ["nobody"]}, sorted({*all_queries} - {*excluded})),
                ({"exclude_history": bundle.remembered is not None}, [q for q in all_queries if not chose[q]]),
            ]:
                by = str(rng.choice(["log_p", "choices"]))
                request = {"id": label, "k": 10, "by": by, "bias_removal": bias_removal, "exclude_history": False}
                (answer,) = find_known_queries(random_case.retriever, [QueriesFor.model_validate(request | options)])
                expected = log_p_QL[:, row] + (np.log(random_case.choices_Q + 0.5) if by == "choices" else 0)
                best = sorted(eligible, key=lambda query: -expected[query])[:10]
                assert [query["id"] for query in answer["queries"]] == [f"u{query}" for query in best]
                np.testing.assert_allclose([q["score"] for q in answer["queries"]], scores_QL[best, row], atol=2e-5)
                np.testing.assert_allclose([q["log_p"] for q in answer["queries"]], log_p_QL[best, row], atol=2e-5)
                np.testing.assert_allclose(
                    [q["choices"] for q in answer["queries"]],
                    np.exp(log_p_QL[best, row]) * (random_case.choices_Q[best] + 0.5),
                    rtol=1e-4,
                )
                assert answer["unknown"]["exclude"] == int("exclude" in options)
                assert [q["display"]["country"] for q in answer["queries"]] == [random_case.countries[q] for q in best]


def test_log_z_of_queries_is_that_of_numpy(random_case: QueriesCase) -> None:
    values = random_case.retriever.queries.bundle.priors
    assert values.names == ["0.0", "0.5", "1.0"]
    for i, bias_removal in enumerate((0.0, 0.5, 1.0)):
        log_z_Q = np.logaddexp.reduce(random_case.scores(bias_removal), axis=1)
        np.testing.assert_allclose(values.values_LP[:, i], -log_z_Q, atol=2e-5)


def test_a_label_that_changed_and_a_new_label_by_its_features(random_case: QueriesCase) -> None:
    at, features = datetime(2026, 11, 1, tzinfo=UTC), {**label_features(1), "item_id": "item-1"}
    changes = [Upsert(id="new", at=at, features=features, display={"title": "New"}), Hide(id="item-2", at=at)]
    changed = random_case.retriever.with_changes(changes)
    by_id, by_features = find_known_queries(changed, [
        QueriesFor(id="new", k=5), QueriesFor(features=features, k=5)
    ])  # fmt: skip
    assert by_id["queries"] == by_features["queries"]
    assert "id" not in by_features
    taste_Q = random_case.vectors_QD @ random_case.bundle.embeddings[1] / random_case.bundle.manifest.temperature
    order = np.argsort(-(taste_Q - np.logaddexp.reduce(random_case.scores(0.5), axis=1)))[:5]
    assert [query["id"] for query in by_id["queries"]] == [f"u{query}" for query in order]
    with pytest.raises(InvalidRequestError, match="expected one of the features") as refused:
        find_known_queries(changed, [QueriesFor(features={"colour": "red"})])
    assert refused.value.field == "features.colour"


def test_impossible_queries_for_labels_are_refused(random_case: QueriesCase, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"one of \[0.0, 0.5, 1.0\], received 0.3"):
        find_known_queries(random_case.retriever, [QueriesFor(id="item-1", bias_removal=0.3)])
    if random_case.bundle.remembered is None:
        with pytest.raises(InvalidRequestError, match="remembers no queries"):
            find_known_queries(random_case.retriever, [QueriesFor(id="item-1", exclude_history=True)])
    bundle = make_bundle(proposal=True).write(tmp_path / "tree")
    pq.write_table(pa.table({"user_id": ["u1", "u1"]}), tmp_path / "twice.parquet")
    with pytest.raises(QueriesError, match=r"an id in every row, once, found \['u1'\] repeated"):
        build(bundle, tmp_path / "releases", queries=KnownQueries(tmp_path / "twice.parquet", "user_id"))
    pq.write_table(pa.table({"user_id": ["u1", "u2"]}), tmp_path / "users.parquet")
    source, notes = KnownQueries(tmp_path / "users.parquet", "user_id"), list[str]()
    with pytest.raises(QueriesError, match=r"not possible with a tree"):
        build(bundle, tmp_path / "releases", queries=source, progress=notes.append)
    assert "queries: no column 'history': embedded as without these features" in notes
    with pytest.raises(QueriesError, match=r"'city': expected whole numbers from 0 on in every row"):
        build(bundle, tmp_path / "releases", queries=KnownQueries(tmp_path / "users.parquet", "user_id", "city"))
    with pytest.raises(QueriesError, match=r"expected a column of ids 'query_id'"):
        build(bundle, tmp_path / "releases", queries=tmp_path / "users.parquet")
    with pytest.raises(NoQueriesError, match="--queries TABLE"):
        find_known_queries(
            load_release(open_releases(tmp_path / "releases"), build(bundle, tmp_path / "releases").name),
            [QueriesFor(id="item-1")],
        )


def test_log_z_from_sampled_labels_tells_its_error() -> None:
    bundle = make_bundle(labels=6_000, cosine=True, seed=4)
    vectors_QD = np.asarray(bundle.calibration_queries)
    exact_QG, none = log_normalisers(bundle, vectors_QD, [0.0, 1.0])
    sampled_QG, error = log_normalisers(bundle, vectors_QD, [0.0, 1.0], most_scores=0)
    assert none == 0
    assert 0 < error < 0.3
    assert np.sqrt(np.mean((sampled_QG - exact_QG) ** 2, axis=0)).max() == pytest.approx(error, rel=1e-3)


def test_new_priors_make_the_index_of_queries_again(tmp_path: Path) -> None:
    before = make_case(tmp_path, bias=True, priors=True, seed=2)
    values = pa.table({"label_id": before.bundle.labels.ids, "margin": np.linspace(-3, 3, LABELS)})
    pq.write_table(values, tmp_path / "other.parquet")
    refresh_priors(tmp_path / "releases", tmp_path / "other.parquet", source="one", name="two")
    after = replace(before, retriever=load_release(open_releases(tmp_path / "releases"), "two"))
    (answer,) = find_known_queries(after.retriever, [QueriesFor(id="item-7", k=USERS)])
    scores_QL = after.scores(0.5)
    log_p_Q = scores_QL[:, 7] - np.logaddexp.reduce(scores_QL, axis=1)
    assert [query["id"] for query in answer["queries"]] == [f"u{query}" for query in np.argsort(-log_p_Q)]


@pytest.mark.parametrize("most", [None, 1, 2, 50])
@pytest.mark.parametrize("by", ["log_p", "choices"])
def test_a_campaign_is_greedy_over_all_pairs(random_case: QueriesCase, by: str, most: int | None) -> None:
    rows, k = [3, 30, 11, 25, 4, 39, 17], 9
    scores_QL = random_case.scores(0.5)
    values_QL = scores_QL - np.logaddexp.reduce(scores_QL, axis=1, keepdims=True)
    values_QL += np.log(random_case.choices_Q + 0.5)[:, None] if by == "choices" else 0
    expected: dict[int, list[int]] = {row: [] for row in rows}
    counts = [0] * USERS
    pairs = [(query, row) for query, refused in enumerate(random_case.refused()) for row in rows if row not in refused]
    for _, row, query in sorted((-values_QL[query, row], row, query) for query, row in pairs):
        if len(expected[row]) < k and (most is None or counts[query] < most):
            expected[row].append(query)
            counts[query] += 1
    options = {"k": k, "by": by, "exclude_history": False}
    chosen = campaign(random_case.retriever, [f"item-{row}" for row in rows], options, most)
    assert [(label, query["id"]) for label, _, query in chosen] == [
        (f"item-{row}", f"u{query}") for row in rows for query in expected[row]
    ]
    assert [rank for _, rank, _ in chosen] == [i for row in rows for i in range(1, len(expected[row]) + 1)]


@pytest.mark.parametrize("random_case", ["popularity and histories"], indirect=True)
def test_batch_invert_writes_a_table(random_case: QueriesCase, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("item_id,note\nitem-3,x\nitem-1,y\nitem-3,z\n")
    column = random_case.bundle.manifest.own_id
    assert column == "item_id"
    releases, options = random_case.folder / "releases", {"k": 2, "exclude_history": False}
    expected = campaign(random_case.retriever, ["item-3", "item-1"], options)
    for name in ("out.parquet", "out.csv", "out.jsonl"):
        assert invert(releases, tmp_path / "labels.csv", tmp_path / name, options, release="one") == 4
        read = {".parquet": pq.read_table, ".csv": csv.read_csv, ".jsonl": json.read_json}[Path(name).suffix]
        table = read(tmp_path / name)
        assert table.column_names == ["item_id", "user_id", "score", "log_p", "choices", "rank"]
        assert table["rank"].to_pylist() == [1, 2, 1, 2]
        assert table["user_id"].to_pylist() == [query["id"] for _, _, query in expected]
        np.testing.assert_allclose(table["log_p"], [query["log_p"] for _, _, query in expected], rtol=1e-5)
    for labels, out, inputs, message in [
        ("item_id\nitem-3\n", "out.csv", {}, "a new file that ends in"),
        ("item_id\nitem-3\n", "more.txt", {}, "a new file that ends in"),
        ("item_id\nnone\n", "more.csv", {}, "expected the id of a label of this release"),
        ("item_id\nitem-3\n", "more.csv", {"by": "taste"}, "--set: by"),
        ("label\nitem-3\n", "more.csv", {}, "item_id"),
    ]:
        (tmp_path / "labels.csv").write_text(labels)
        with pytest.raises(ServingError, match=message):
            invert(releases, tmp_path / "labels.csv", tmp_path / out, inputs, release="one")
    assert not (tmp_path / "more.csv").exists()


def test_over_http_and_in_python(random_case: QueriesCase, tmp_path: Path) -> None:
    with open_client(create_app(plane_settings(tmp_path), retriever=random_case.retriever)) as client:
        answer = client.post("/v1/queries", json={"ids": ["item-1", "item-2"], "k": 3, "display": ["country"]})
        assert answer.status_code == 200
        assert [result["id"] for result in answer.json()["results"]] == ["item-1", "item-2"]
        for result in answer.json()["results"]:
            (expected,) = find_known_queries(
                random_case.retriever, [QueriesFor(id=result["id"], k=3, display=["country"])]
            )
            assert [query["id"] for query in result["queries"]] == [query["id"] for query in expected["queries"]]
            assert [*result] == ["id", "bias_removal", "queries", "unknown"]
        for body, status, field in [
            ({"id": "nothing"}, 404, "id"), ({"ids": ["item-1", "nothing"]}, 404, "ids.1"),
            ({"id": "item-1", "filter": {"colour": "red"}}, 422, "filter.colour"),
            ({"id": "item-1", "features": {}}, 422, None), ({"id": "item-1", "k": 10**6}, 422, "k"),
            ({"id": "item-1", "cooccurrence": 1}, 422, "cooccurrence"),
            ({"features": {"year": "late"}}, 422, "features.year"),
        ]:  # fmt: skip
            refused = client.post("/v1/queries", json=body)
            assert (refused.status_code, refused.json()["error"].get("field")) == (status, field), refused.text
        described = client.get("/v1/release").json()["queries"]
        assert (described["count"], described["bias_removal"]) == (USERS, [0.0, 0.5, 1.0])
        assert [column["name"] for column in described["filterable"]] == ["country"]
        assert 'longtail_requests_total{route="/v1/queries",status="2xx"} 1.0' in client.get("/metrics").text
    table = Model(random_case.bundle, retriever=random_case.retriever).queries_for("item-1", k=3)
    (expected,) = find_known_queries(random_case.retriever, [QueriesFor(id="item-1", k=3)])
    assert table["rank"].tolist() == [1, 2, 3]
    assert table["log_p"].tolist() == [query["log_p"] for query in expected["queries"]]


def test_a_release_without_an_index_of_queries_says_what_to_do(client: httpx.Client) -> None:
    refused = client.post("/v1/queries", json={"id": "a"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "no_queries")
    assert "longtail-index build --queries TABLE" in refused.json()["error"]["message"]
    assert client.get("/v1/release").json()["queries"] is None


def test_a_release_carries_its_index_of_queries(tmp_path: Path) -> None:
    """A refresh of co-occurrence links it, publishing refuses its loss, and its files are verified."""
    case = make_case(tmp_path, cooccurrence=True, seed=3)
    releases = open_releases(tmp_path / "releases")
    releases.publish("one")
    log = {"label_id": ["item-14", "item-4"], "event": ["buy", "return"], "time": [1.7e9, 1.7e9 + 60]}
    later = pa.table({"user_id": ["u1", "u1"], **log})
    pq.write_table(later, tmp_path / "log.parquet")
    refresh(tmp_path / "releases", tmp_path / "log.parquet", name="two")
    assert (tmp_path / "releases/one/queries/index/index.faiss").samefile(
        tmp_path / "releases/two/queries/index/index.faiss"
    )
    after = load_release(releases, "two")
    for label, excluded in (("item-14", True), ("item-4", False)):
        request = {"id": label, "k": USERS, "exclude_history": excluded}
        before, now = (
            {query["id"] for query in find_known_queries(retriever, [QueriesFor.model_validate(request)])[0]["queries"]}
            for retriever in (case.retriever, after)
        )
        assert before - now == {"u1"}
    build(tmp_path / "bundle", tmp_path / "releases", name="three")
    with pytest.raises(NotPublishableError, match="queries: expected an index of queries as in the published release"):
        releases.publish("three")
    with pytest.raises(UnservableReleaseError, match="queries: expected an index of queries"):
        load_release(releases, "three").check_compatible(case.retriever)
    assert releases.bytes("two") > releases.bytes("three")
    path = tmp_path / "releases/two/queries/bundle/embeddings.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(ReleaseCorruptError, match=r"queries/bundle/embeddings\.npy"):
        releases.verify("two")
