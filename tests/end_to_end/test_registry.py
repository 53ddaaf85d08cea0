"""Bundles in a registry of MLflow's own, in SQLite: trained, registered, promoted by alias and built from there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, BundleCorruptError
from longtail.bundle.errors import ObjectStoreError
from longtail.bundle.registry import RegisteredVersion, download_version, upload_version
from longtail.index import build, open_releases
from longtail.index.building.refresh import refresh_priors
from longtail.index.cli import main as index_main
from longtail.trainer import fit
from longtail.trainer.cli import app as train_app
from longtail.trainer.trackers import trackers
from tests.bundles import make_bundle
from tests.trainer.tiny import recipe, write_job

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and those of its Alembic are not ours


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the artifacts of an empty registry, where MLflow's variables point."""
    mlflow = pytest.importorskip("mlflow", reason="expected mlflow-skinny")
    root = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db")
        patched.setenv("MLFLOW_EXPERIMENT_NAME", "shop")
        patched.setenv("LONGTAIL_CACHE", str(root / "cache"))
        mlflow.create_experiment("shop", artifact_location=(root / "artifacts").as_uri())
        yield root / "artifacts"


@pytest.fixture(scope="module")
def books(store: Path) -> Path:
    """A bundle, registered as `models:/books/1` by the alias `champion`."""
    path = store.parent / "books"
    make_bundle(labels=60, dim=4, queries=20).write(path)
    assert upload_version(path, "models:/books@champion").version == 1
    return path


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


@pytest.mark.nightly
@pytest.mark.usefixtures("store")
def test_the_version_of_a_tracked_training_is_of_its_run_and_is_built_by_alias(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = fit(write_job(tmp_path), tmp_path / "run", track=["mlflow"])
    run = json.loads((tmp_path / "run" / "history.json").read_text())["runs"]["mlflow"]
    train_app(["upload", str(tmp_path / "run"), "models:/tiny@champion"], standalone_mode=False)
    assert f"registered: models:/tiny/1, run {run}" in capsys.readouterr().out
    data = client().get_run(run).data
    assert json.loads(data.params["model.dim"]) == bundle.manifest.dim
    dial = bundle.manifest.bias_removal
    (point,) = [entry for entry in dial.curve if entry.bias_removal == dial.default]
    assert data.metrics[f"{dial.curve_split}/recall_at_3"] == point.metrics["recall@3"].value
    assert "train/loss" in data.metrics

    releases = tmp_path / "releases"
    index_main_ok(["build", "models:/tiny@champion", "--releases", str(releases), "--publish"])
    name = open_releases(releases).current()
    assert name is not None
    assert f"from models:/tiny/1, run {run}" in capsys.readouterr().out
    manifest = open_releases(releases).verify(name).manifest
    assert manifest.registered == RegisteredVersion(name="tiny", version=1, run=run)


def index_main_ok(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        index_main(arguments)
    assert ended.value.code in (0, None)


@pytest.mark.usefixtures("store")
def test_resumed_training_continues_its_run(tmp_path: Path) -> None:
    runs: dict[str, str] = {}
    for step, loss in ((1, 1.0), (2, 0.5)):
        with trackers(tmp_path, recipe(), ["mlflow"], runs) as record:
            record({"train/loss": loss}, step)
    measured = client().get_metric_history(runs["mlflow"], "train/loss")
    assert [(entry.step, entry.value) for entry in measured] == [(1, 1.0), (2, 0.5)]


@pytest.mark.usefixtures("books")
def test_build_calls_the_registry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an alias that moves between two questions gives the bundle of one version the name of another."""
    calls: list[str] = []
    of_client = type(client())
    for name in ("get_model_version", "get_model_version_by_alias"):
        real = getattr(of_client, name)
        monkeypatch.setattr(
            of_client, name, lambda *arguments, real=real, name=name: calls.append(name) or real(*arguments)
        )
    build("models:/books@champion", tmp_path / "releases", name="once")
    assert calls == ["get_model_version_by_alias"]


def test_alias_moves_between_versions(books: Path, tmp_path: Path) -> None:
    make_bundle(labels=70, dim=4, queries=20).write(tmp_path / "second")
    second = upload_version(tmp_path / "second", "models:/books")
    assert second.version == 2
    assert build("models:/books@champion", tmp_path / "releases", name="a").labels == 60
    client().set_registered_model_alias("books", "champion", 2)
    built = build("models:/books@champion", tmp_path / "releases", name="b")
    assert (built.labels, built.registered) == (70, second)
    assert build("models:/books/1", tmp_path / "releases", name="c").labels == 60
    assert download_version("models:/books@champion")[1] == second
    copy, _ = download_version("models:/books/1")
    assert (copy / "manifest.json").read_bytes() == (books / "manifest.json").read_bytes()
    assert build(books, tmp_path / "releases", name="d").registered is None


def test_a_release_with_new_priors_keeps_the_version(books: Path, tmp_path: Path) -> None:
    ids = Bundle.load(books).labels.ids
    pq.write_table(pa.table({"label_id": ids, "margin": np.linspace(0, 1, len(ids))}), tmp_path / "priors.parquet")
    built = build("models:/books/1", tmp_path / "releases", name="a", priors=tmp_path / "priors.parquet")
    again = refresh_priors(tmp_path / "releases", tmp_path / "priors.parquet", source="a", name="b")
    assert built.registered is not None
    assert again.registered == built.registered


def test_a_damaged_version_is_refused_and_leaves_no_copy(store: Path, tmp_path: Path) -> None:
    make_bundle(labels=80, dim=4, queries=20).write(tmp_path / "third")
    built = upload_version(tmp_path / "third", "models:/damaged")
    (file,) = store.glob(f"{built.run}/artifacts/*/embeddings.npy")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BundleCorruptError, match=r"embeddings\.npy: expected sha256"):
        download_version(built.source)
    file.write_bytes(content)
    assert (download_version(built.source)[0] / "embeddings.npy").read_bytes() == content


@pytest.mark.usefixtures("store")
def test_failed_upload_changes_no_run_and_no_version(tmp_path: Path) -> None:
    run = client().create_run(client().get_experiment_by_name("shop").experiment_id).info.run_id
    client().set_terminated(run)
    built = replace(
        make_bundle(labels=90, dim=4, queries=20),
        reports={"history.json": json.dumps({"runs": {"mlflow": run}}).encode()},
    )
    built.write(tmp_path / "fourth")
    for _ in range(2):
        with pytest.raises(ObjectStoreError, match="v1"):
            upload_version(tmp_path / "fourth", "models:/fourth@v1")  # an alias that MLflow reserves
    assert client().get_run(run).info.status == "FINISHED"
    assert upload_version(tmp_path / "fourth", "models:/fourth@champion").version == 1


@pytest.mark.usefixtures("books")
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("models:/books", "models:/books: expected models:/NAME@ALIAS or models:/NAME/VERSION"),
        ("models:/books@nothing", "models:/books@nothing: MLflow at sqlite:///.*nothing"),
        ("models:/books/99", "models:/books/99: MLflow at sqlite:///.*99"),
        ("models:/films/1", "models:/films/1: MLflow at sqlite:///.*films"),
    ],
)
def test_missing_model_is_named(url: str, message: str) -> None:
    with pytest.raises(ObjectStoreError, match=message):
        download_version(url)


def test_a_version_has_its_number_from_the_registry(books: Path) -> None:
    with pytest.raises(ObjectStoreError, match="models:/books/7: expected models:/NAME or models:/NAME@ALIAS"):
        upload_version(books, "models:/books/7")


@pytest.mark.usefixtures("books")
def test_run_missing_from_the_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = make_bundle(labels=60, dim=4, queries=20)
    replace(built, reports={"history.json": b'{"runs": {"mlflow": "0123456789abcdef0123456789abcdef"}}'}).write(
        tmp_path / "elsewhere"
    )
    with pytest.raises(ObjectStoreError, match=r"run 0123\w+ \(MLFLOW_RUN_ID names another\)"):
        upload_version(tmp_path / "elsewhere", "models:/elsewhere")
    run = download_version("models:/books/1")[1].run
    monkeypatch.setenv("MLFLOW_RUN_ID", str(run))
    assert upload_version(tmp_path / "elsewhere", "models:/elsewhere").run == run


def test_missing_mlflow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ObjectStoreError, match=r"models:/books@champion: expected the extra `track`"):
        download_version("models:/books@champion")
