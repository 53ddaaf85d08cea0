"""Towers of several features, as TFRS' tutorials write them: traced, indexed under floors, served, added to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from pyarrow import feather

from longtail.bundle import read_manifest
from tests.serving.process import server

ROOT = Path(__file__).parents[2]
ASKED = [{"user_id": "user 3", "age": 23}, {"user_id": "a stranger", "age": 61}]
ADDED = {"category": "comedy", "title": "The comedy: PART-3"}


def index(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longtail.index", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tfrs_python: str) -> Path:
    """A bundle, what TFRS says of its queries, and a release that has met its floors."""
    root = tmp_path_factory.mktemp("two-features")
    run = subprocess.run(
        [tfrs_python, "-m", "tests.tfrs.train_two_features", root / "films", root / "scores.json"], cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    (root / "releases").mkdir()
    (root / "releases" / "promise.toml").write_text('metric = "recall@10"\n[floors]\ntorso = 0.01\n')
    build = index("build", root / "films", "--releases", root / "releases", "--publish")
    assert build.returncode == 0, build.stdout + build.stderr
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with server(folder / "releases", folder / "server.log", state=folder / "state") as running:
        running.wait_until_ready()
        with httpx.Client(base_url=running.url, timeout=30) as http:
            yield http


def answers(client: httpx.Client, bias_removal: float | None, k: int = 40) -> list[dict[str, float]]:
    queries = [{"features": features, "k": k, "bias_removal": bias_removal} for features in ASKED]
    answer = client.post("/v1/retrieve", json={"queries": queries})
    assert answer.status_code == 200, answer.text
    return [{label["id"]: label["score"] for label in result["labels"]} for result in answer.json()["results"]]


def expected(folder: Path, bias_removal: float) -> list[dict[str, float]]:
    """TFRS' scores and λ·log ν, which for a label that is not in the bundle is its rarest label's."""
    labels = feather.read_table(folder / "films" / "labels.arrow").to_pydict()
    log_pn = dict(zip(labels["label_id"], labels["log_pn"], strict=True))
    rows: list[dict[str, float]] = json.loads((folder / "scores.json").read_text())
    least = min(log_pn.values())
    return [{film: score + bias_removal * log_pn.get(film, least) for film, score in row.items()} for row in rows]


def test_the_bundle_says_what_was_measured_and_takes_features(folder: Path) -> None:
    manifest = read_manifest(folder / "films")
    assert [(f.name, f.kind) for f in manifest.query_features] == [("user_id", "id"), ("age", "number")]
    assert [(f.name, f.kind) for f in manifest.label_features] == [
        ("film_id", "id"), ("category", "id"), ("title", "text"),
    ]  # fmt: skip
    assert manifest.own_id == "film_id"
    dial = manifest.bias_removal
    assert (dial.noise, dial.curve_split, dial.chosen_by) == ("π", "valid", "valid recall@10")
    assert [point.bias_removal for point in dial.curve] == pytest.approx(np.arange(11) / 10)
    recall = {point.bias_removal: point.metrics["recall@10"].value for point in dial.curve}
    assert recall[dial.default] == max(recall.values()) > 0
    figures: dict[str, Any] = json.loads((folder / "films" / "metrics.json").read_text())
    assert figures["default"] == dial.default
    assert figures["held_out"]["valid"]["pairs"] == 200
    assert 0 < figures["held_out"]["valid"]["measured"] < 200, "what was seen in training is not to be found again"


@pytest.mark.parametrize("bias_removal", [None, 0.0, 1.0])
def test_http_answers_are_brute_force_of_the_keras_model(
    folder: Path, client: httpx.Client, bias_removal: float | None
) -> None:
    served = read_manifest(folder / "films").bias_removal.default if bias_removal is None else bias_removal
    for found, wanted in zip(answers(client, bias_removal), expected(folder, served), strict=True):
        del wanted["film new"]
        assert found == pytest.approx(wanted, abs=1e-4)


def test_a_label_is_added_by_its_features(folder: Path, client: httpx.Client) -> None:
    added = client.post(
        "/v1/labels", json={"labels": [{"id": "film new", "features": ADDED, "display": {"title": "Comedy"}}]}
    )
    assert added.status_code == 200, added.text
    for found, wanted in zip(answers(client, 0.5, k=41), expected(folder, 0.5), strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
