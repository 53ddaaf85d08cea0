"""The TFRS tutorial: trained in its environment, indexed and served from ours, answering as TFRS itself does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from tests.end_to_end.commands import longtail, served

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
STRANGER = "a stranger"
QUERY_IDS = ["1", "17", "40", STRANGER]
MOVIES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tfrs_python: str) -> Path:
    """Generated ratings, the example's bundle, TFRS' scores, a published release."""
    root = tmp_path_factory.mktemp("tutorial")
    rng = np.random.default_rng(0)
    users = rng.integers(1, 41, 3000)
    movies = (users * 7 + rng.geometric(0.08, 3000)) % MOVIES
    pq.write_table(pa.table({"user_id": users, "item_id": movies, "rating": users % 5}), root / "interactions.parquet")
    titles = [f"Movie {movie}, Thé ({1930 + movie})" for movie in range(MOVIES)]
    pq.write_table(pa.table({"item_id": range(MOVIES), "title": titles}), root / "items.parquet")
    run = subprocess.run(
        [tfrs_python, "-m", "tests.tfrs.train_tutorial", root, root / "model", root / "scores.json", *QUERY_IDS],
        cwd=ROOT, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert "top-100 accuracy of the test ratings: " in run.stdout
    longtail("index", "build", root / "model", "--releases", root / "releases", "--publish")
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with served(folder) as http:
        yield http


@pytest.mark.parametrize("bias_removal", [None, 0.0, 1.0])
def test_http_answers_are_tfrs_brute_force(folder: Path, client: httpx.Client, bias_removal: float | None) -> None:
    scores = json.loads((folder / "scores.json").read_text())
    labels = feather.read_table(folder / "model" / "labels.arrow").to_pydict()
    assert len(set(labels["count"])) > 5
    log_pn = dict(zip(labels["label_id"], labels["log_pn"], strict=True))
    queries = [{"features": {"user_id": user}, "k": MOVIES, "bias_removal": bias_removal} for user in QUERY_IDS]
    answer = client.post("/v1/retrieve", json={"queries": queries})
    assert answer.status_code == 200, answer.text
    for user, result in zip(QUERY_IDS, answer.json()["results"], strict=True):
        is_stranger = user == STRANGER
        assert result["basis"] == ("popularity" if is_stranger else "model")
        expected = {title: score + (bias_removal or 0) * log_pn[title] for title, score in scores[user].items()}
        expected = log_pn if is_stranger else expected  # TFRS answers with the vector of ids that it has not seen
        actual = {label["id"]: label["score"] for label in result["labels"]}
        assert actual.keys() == expected.keys()
        assert list(actual.values()) == sorted(actual.values(), reverse=True)
        for title, score in actual.items():
            assert score == pytest.approx(expected[title], rel=1e-4, abs=1e-4)


def test_ids_may_be_numbers(client: httpx.Client) -> None:
    by_text, by_number = (
        client.post("/v1/retrieve", json={"queries": [{"features": {"user_id": user}}], "answer_ids": False}).json()[
            "results"
        ]
        for user in ("17", 17)
    )
    assert by_text == by_number


def test_the_change_to_the_tutorial_is_one_line() -> None:
    source = (ROOT / "examples" / "tfrs_movielens.py").read_text()
    assert source.count("SampledRetrieval(") == 1
    assert "# ONE LINE, in the tutorial: task = tfrs.tasks.Retrieval(metrics=metrics)\n    task = Sampled" in source
