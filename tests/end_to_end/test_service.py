"""The real server process over HTTP, against scores computed from the files of the bundle alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, seed, settings, strategies as st
from pyarrow import feather

from longtail.bundle import Proposal
from longtail.bundle.integrity import read_manifest
from longtail.index import IndexSpec, build, open_releases
from tests.bundles import log_p_n, make_bundle
from tests.end_to_end import killing
from tests.serving.process import ServerProcess, server, until

LABELS, USERS = 60, 20
QUERY = {"features": {"user_id": "u3", "history": ["item-1", "item-2"]}, "k": 10, "bias_removal": 0.25}


class Reference:
    """`u·v/T + b + λ·log ν + μ·log π` in float64, from the files of the bundle alone."""

    def __init__(self, bundle: Path) -> None:
        self.labels = feather.read_table(bundle / "labels.arrow")
        self.ids = self.labels["label_id"].to_pylist()
        self.temperature = read_manifest(bundle).temperature
        self.embeddings_LD = np.load(bundle / "embeddings.npy").astype(np.float64)
        self.log_pn_L = self.labels["log_pn"].to_numpy().astype(np.float64)
        log_pi = "log_popularity" if "log_popularity" in self.labels.column_names else "log_pn"
        self.log_pi_L = self.labels[log_pi].to_numpy().astype(np.float64)
        has_bias = "bias" in self.labels.column_names
        self.bias_L = self.labels["bias"].to_numpy().astype(np.float64) if has_bias else np.zeros(len(self.ids))
        self.tower = ort.InferenceSession(bundle / "query_tower.onnx")
        self.users = feather.read_table(bundle / "vocabularies" / "users.arrow")["id"].to_pylist()
        self.tree = Proposal.read(bundle / "proposal.npz") if (bundle / "proposal.npz").exists() else None

    def knows(self, user: str, history: list[str]) -> bool:
        """Whether the tower knows the user or a label that counts; else log π ranks."""
        return user in self.users or not {*history[-10:]}.isdisjoint(self.ids)

    def read(self, user: str, history: list[str]) -> dict[str, np.ndarray]:
        """Inputs of the query tower; row 0 is for unknown ids."""
        row = {id_: row for row, id_ in enumerate(self.users, start=1)}
        item = {id_: row for row, id_ in enumerate(self.ids, start=1)}
        return {
            "user_id": np.array([row.get(user, 0)], np.int32),
            "history": np.array([[item.get(id_, 0) for id_ in history[-10:]] or [0]], np.int32),
            "history__weight": np.array([[1] * len(history[-10:]) or [0]], np.float32),
        }

    def embed(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(self.tower.run(None, inputs)[0][0], np.float64)

    def scores(self, user: str, history: list[str], bias_removal: float, popularity: float) -> np.ndarray:
        if not self.knows(user, history):
            return self.log_pi_L
        inputs, log_pn_L = self.read(user, history), self.log_pn_L
        if self.tree is not None:
            projection = {name: rows.astype(np.float64) for name, rows in self.tree.projection.items()}
            bag_K = inputs["history__weight"][0] @ projection["history"][inputs["history"][0]]
            log_pn_L = log_p_n(self.tree, projection["user_id"][inputs["user_id"][0]] + bag_K + self.tree.offset)
        f_L = self.embeddings_LD @ self.embed(inputs) / self.temperature + self.bias_L
        return f_L + bias_removal * log_pn_L + popularity * self.log_pi_L


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Releases of different models: cosine without label bias, dot with, dot with a tree p_n(y|x) too, and cosine of
    a noise that is not the label frequency, once in an inverted file.
    """
    root = tmp_path_factory.mktemp("service")
    for name, model in (
        ("cosine", make_bundle(labels=LABELS, users=USERS)),
        ("dot", make_bundle(labels=LABELS, users=USERS, cosine=False, bias=True, seed=1)),
        ("tree", make_bundle(labels=LABELS, users=USERS, cosine=False, bias=True, proposal=True, seed=2)),
        ("noise", make_bundle(labels=LABELS, users=USERS, bias=True, popularity=True, seed=3)),
        ("noise-ivf", make_bundle(labels=LABELS, users=USERS, popularity=True, seed=4)),
    ):
        model.write(root / "bundles" / name)
        spec = "ivf_flat" if name == "noise-ivf" else "flat"
        build(root / "bundles" / name, root / "releases", spec=IndexSpec(spec, recall_floor=1), name=name)
    return root / "releases"


@pytest.fixture(scope="module")
def service(releases: Path) -> Iterator[ServerProcess]:
    open_releases(releases).publish("cosine")
    with server(releases, releases.parent / "server.log", poll_seconds=0.05, drain_seconds=0.5) as process:
        process.wait_until_ready()
        yield process


def publish_and_wait(service: ServerProcess, releases: Path, name: str) -> None:
    open_releases(releases).publish(name)
    until(lambda: httpx.get(f"{service.url}/v1/release").json()["name"] == name, f"{name} to be served")


def check_ranking(labels: list[dict], ids: list[str], scores_L: np.ndarray, k: int) -> None:
    """The k best by the reference, in order; labels whose scores differ by rounding may trade places."""
    expected = np.sort(scores_L)[::-1][:k]
    assert len({label["id"] for label in labels}) == len(labels) == k
    answered = [scores_L[ids.index(label["id"])] for label in labels]
    np.testing.assert_allclose(answered, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([label["score"] for label in labels], answered, rtol=1e-4, atol=1e-5)
    order = np.argsort(-scores_L, kind="stable")
    gaps = -np.diff(scores_L[order])
    for rank, label in enumerate(labels):
        is_separate = (rank == 0 or gaps[rank - 1] > 1e-4) and (rank == len(gaps) or gaps[rank] > 1e-4)
        assert not is_separate or label["id"] == ids[order[rank]]


query = st.tuples(
    st.integers(0, USERS + 3).map("u{}".format),
    st.lists(st.integers(0, LABELS + 5).map("item-{}".format), max_size=14),
    st.floats(-1, 2),
    st.floats(-1, 2),
    st.integers(1, LABELS),
    st.sets(st.integers(0, LABELS - 1).map("item-{}".format), max_size=4),
)


def limit_dials(name: str, bias_removal: float, popularity: float) -> dict[str, float]:
    """A place on both dials that the release answers: λ >= 0 with a tree, λ + μ within λ's limits in one coordinate."""
    if name == "tree":
        return {"bias_removal": abs(bias_removal), "popularity": popularity}
    both = name.startswith("noise") or -1 <= bias_removal + popularity <= 2
    return {"bias_removal": bias_removal, "popularity": popularity if both else 0.0}


@pytest.mark.parametrize("name", ["cosine", "dot", "tree", "noise", "noise-ivf"])
def test_answers_equal_the_formula_over_the_bundle_files(service: ServerProcess, releases: Path, name: str) -> None:
    publish_and_wait(service, releases, name)
    reference = Reference(releases / name / "bundle")
    with httpx.Client(base_url=service.url) as client:

        @seed(2)
        @settings(max_examples=30, deadline=None, database=None)
        @given(st.lists(query, min_size=1, max_size=30))
        def holds(queries: list[tuple[str, list[str], float, float, int, set[str]]]) -> None:
            dials = [limit_dials(name, bias_removal, popularity) for _, _, bias_removal, popularity, _, _ in queries]
            body = [
                {"features": {"user_id": user, "history": history}, **dial, "k": k, "exclude": sorted(exclude)}
                for (user, history, _, _, k, exclude), dial in zip(queries, dials, strict=True)
            ]
            answer = client.post("/v1/retrieve", json={"queries": body}).json()
            assert answer["release"] == name
            for (user, history, _, _, k, exclude), dial, result in zip(queries, dials, answer["results"], strict=True):
                is_known = reference.knows(user, history)
                used = dial if is_known else {"bias_removal": 0.0, "popularity": 1.0}
                assert {key: result[key] for key in used} == used
                assert result["basis"] == ("model" if is_known else "popularity")
                eligible_rows = [row for row, id_ in enumerate(reference.ids) if id_ not in exclude]
                scores_L = reference.scores(user, history, **dial)[eligible_rows]
                ids = [reference.ids[row] for row in eligible_rows]
                check_ranking(result["labels"], ids, scores_L, min(k, len(eligible_rows)))

        holds()


def test_a_second_service_on_the_same_state_is_refused_in_one_line(
    service: ServerProcess, releases: Path, tmp_path: Path
) -> None:
    assert httpx.get(f"{service.url}/livez").status_code == 200
    with killing.server(releases, tmp_path / "log") as second:
        assert second.process.wait(20) == 2
    assert (tmp_path / "log").read_text().splitlines()[-1] == (
        f"longtail-serve: state directory {releases / '.state'}: expected one that no other service uses (--state), "
        "found one in use"
    )
