"""The example in plain PyTorch: trained in its environment, indexed and served from ours."""

from __future__ import annotations

import json
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
FILMS = 60


def test_torch_suite_passes(torch_python: str) -> None:
    run = subprocess.run(
        [torch_python, "-m", "pytest", "-p", "no:cacheprovider", "--noconftest", "tests/torch/inside"], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, torch_python: str) -> Path:
    root = tmp_path_factory.mktemp("torch")
    rng = np.random.default_rng(0)
    users = rng.integers(1, 41, 3000)
    films = (users * 7 + rng.geometric(0.08, 3000)) % FILMS
    log = {"user_id": users, "item_id": films, "rating": users % 5, "timestamp": np.arange(3000)}
    pq.write_table(pa.table(log), root / "interactions.parquet")
    pq.write_table(pa.table({"user_id": range(1, 41), "age": range(20, 60)}), root / "users.parquet")
    displayed = {
        "title": [f"Film {film}" for film in range(FILMS)],
        "genres": ["Drama", "Comedy|War", "War"] * (FILMS // 3),
    }
    pq.write_table(pa.table({"item_id": range(FILMS)} | displayed), root / "items.parquet")
    run = subprocess.run(
        [torch_python, "-m", "tests.torch.train_example", root, root / "model", root / "answers.json"], cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    longtail("index", "build", root / "model", "--releases", root / "releases", "--publish")
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with served(folder) as http:
        yield http


@pytest.mark.parametrize("bias_removal", [0.0, 0.5, 1.0])
def test_http_answers_are_brute_force_in_torch(folder: Path, client: httpx.Client, bias_removal: float) -> None:
    answers = json.loads((folder / "answers.json").read_text())
    labels = feather.read_table(folder / "model" / "labels.arrow").to_pydict()
    log_pn = dict(zip(labels["label_id"], labels["log_pn"], strict=True))
    dial = {"k": FILMS, "bias_removal": bias_removal, "exclude_history": False}
    answer = client.post("/v1/retrieve", json={"queries": [{"features": item["features"]} | dial for item in answers]})
    assert answer.status_code == 200, answer.text
    for item, result in zip(answers, answer.json()["results"], strict=True):
        expected = {film: score + bias_removal * log_pn[film] for film, score in item["scores"].items()}
        actual = {label["id"]: label["score"] for label in result["labels"]}
        assert actual.keys() == expected.keys()
        assert list(actual.values()) == sorted(actual.values(), reverse=True)
        for film, score in actual.items():
            assert score == pytest.approx(expected[film], abs=2e-5)


def test_new_film_is_embedded_by_genres(client: httpx.Client) -> None:
    vector = [1.0, 0.0, 0.0]
    added = client.post("/v1/labels", json={"labels": [{"id": "new film", "features": {"genres": vector}}]})
    assert added.status_code == 200, added.text
    answer = client.post("/v1/retrieve", json={"queries": [{"features": {"user_id": "1"}, "k": FILMS + 1}]})
    assert "new film" in {label["id"] for label in answer.json()["results"][0]["labels"]}
