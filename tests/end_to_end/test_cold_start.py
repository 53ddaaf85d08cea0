"""Labels added to, hidden from and merged into a running service, against scores worked out from the bundle's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from pyarrow import feather
from typer.testing import CliRunner

from longtail.client import Answer, Client, Feedback, NewLabel, NotFoundError
from longtail.index import IndexSpec, build, cli, open_releases
from longtail.serving.core.loader import load_release
from longtail.serving.errors import UnservableReleaseError
from tests.bundles import label_features, make_bundle
from tests.end_to_end.killing import server
from tests.end_to_end.test_service import Reference
from tests.serving.process import ServerProcess, until

LABELS = 60
FEATURES: dict[str, Any] = {"user_id": "u3", "history": ["item-1", "item-2"]}
NEW = NewLabel("new/é 1", {"genres": {"g1": 1.0, "g3": 0.5}, "year": -0.5}, {"title": "Neu"})


class ColdReference(Reference):
    """Scores of a label that the bundle does not have, from its ONNX files and label table alone."""

    def __init__(self, bundle: Path) -> None:
        super().__init__(bundle)
        self.label_tower = ort.InferenceSession(bundle / "label_tower.onnx")

    def query(self) -> np.ndarray:
        return self.embed(self.read(FEATURES["user_id"], FEATURES["history"]))

    def label(self, genres: Mapping[int, float], year: float) -> np.ndarray:
        """Of an unknown id; genre g0 is row 1."""
        inputs = {
            "item_id": np.array([0], np.int32),
            "genres": np.array([list(genres)], np.int32),
            "genres__weight": np.array([list(genres.values())], np.float32),
            "year": np.array([year], np.float32),
        }
        return np.asarray(self.label_tower.run(None, inputs)[0][0], np.float64)

    def new(self) -> np.ndarray:
        return self.label({2: 1.0, 4: 0.5}, -0.5)

    def score(self, label_D: np.ndarray, bias_removal: float, popularity: float = 0.0) -> float:
        """u·v/T + λ·log ν + μ·log π, both those of the rarest label; its bias is 0."""
        of_label = bias_removal * float(self.log_pn_L.min()) + popularity * float(self.log_pi_L.min())
        return float(self.query() @ label_D / self.temperature + of_label)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Releases of different models: `bare` has no label tower, `dot` has label biases, too, `noise` two coordinates."""
    root = tmp_path_factory.mktemp("cold")
    for name, model in (
        ("first", make_bundle(labels=LABELS, label_tower=True)),
        ("second", make_bundle(labels=LABELS, label_tower=True, seed=1)),
        ("dot", make_bundle(labels=LABELS, label_tower=True, cosine=False, bias=True, seed=2)),
        ("noise", make_bundle(labels=LABELS, label_tower=True, popularity=True, seed=3)),
        ("bare", make_bundle(labels=LABELS)),
    ):
        model.write(root / name)
        build(root / name, root / "releases", spec=IndexSpec("flat"), name=name)
    return root


@contextmanager
def serving(root: Path, state: Path, name: str = "first", **settings: object) -> Iterator[tuple[ServerProcess, Client]]:
    open_releases(root / "releases").publish(name)
    settings = {"state": state, "poll_seconds": 0.05, "drain_seconds": 0, **settings}
    with server(root / "releases", state.parent / "server.log", **settings) as process, Client(process.url) as longtail:
        process.wait_until_ready()
        yield process, longtail


def longtail_index(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def scores(answer: Answer) -> dict[str, float]:
    (result,) = answer.results
    return {label.id: label.score for label in result.labels}


def everything(longtail: Client, **selection: Any) -> dict[str, float]:
    """Scores of as many labels as one may ask for."""
    return scores(longtail.retrieve(features=FEATURES, **({"k": LABELS} | selection)))


@pytest.mark.parametrize("name", [pytest.param("first", marks=pytest.mark.nightly), "dot", "noise"])
def test_new_label_is_scored_by_the_formula(root: Path, tmp_path: Path, name: str) -> None:
    reference = ColdReference(root / name)
    with serving(root, tmp_path / "state", name) as (_, longtail):
        before = everything(longtail, bias_removal=0.25)
        accepted = longtail.add_labels([NEW, NewLabel("plain", {})])
        assert (accepted["accepted"], accepted["release"]) == (2, name)
        for dials in ((-1.0, 0.0), (0.0, 0.0), (0.25, 0.0), (1.0, 1.0), (2.0, 0.0), (1.5, -0.5), (0.25, 1.5)):
            bias_removal, popularity = dials
            only = longtail.retrieve(
                features=FEATURES, allow=[NEW.id, "plain"], bias_removal=bias_removal, popularity=popularity
            )
            by_hand = {
                NEW.id: reference.score(reference.new(), *dials),
                "plain": reference.score(reference.label({0: 0.0}, 0.5), *dials),
            }
            assert scores(only) == pytest.approx(by_hand, rel=1e-4, abs=1e-4)
            assert {label.bucket for label in only.results[0].labels} == {"new"}
        expected = before | {
            NEW.id: reference.score(reference.new(), 0.25),
            "plain": reference.score(reference.label({0: 0.0}, 0.5), 0.25),
        }
        best = sorted(expected, key=lambda id_: -expected[id_])[:LABELS]
        assert list(everything(longtail, bias_removal=0.25)) == best

        label = longtail.label(NEW.id)
        assert {**label, "id": NEW.id, "count": 0, "bucket": "new", "display": {"title": "Neu"}} == label
        assert label["log_pn"] == pytest.approx(float(reference.log_pn_L.min()))
        assert label["bias"] in (None, 0.0)
        assert longtail.label("plain")["display"] == {"title": None}
        assert longtail.monitoring()["labels"] == {"added": 2, "hidden": 0, "available": 62}


def test_labels_are_hidden_deleted_restored_and_embedded_again(root: Path, tmp_path: Path) -> None:
    name = "dot"  # which has biases, too
    reference = ColdReference(root / name)
    with serving(root, tmp_path / "state", name) as (_, longtail):
        plain = everything(longtail)
        longtail.add_labels(NEW)
        longtail.delete_label(NEW.id)
        longtail.delete_label(NEW.id)
        longtail.delete_label("item-7")
        assert longtail.monitoring()["labels"] == {"added": 0, "hidden": 1, "available": 59}
        assert everything(longtail) == {id_: score for id_, score in plain.items() if id_ != "item-7"}
        for id_ in (NEW.id, "item-7"):
            assert everything(longtail, allow=[id_]) == {}
            for find in (longtail.label, longtail.similar):
                with pytest.raises(NotFoundError) as raised:
                    find(id_)
                assert raised.value.type == "unknown_label"
        assert len(longtail.similar("item-8", k=LABELS).results[0].labels) == LABELS - 2
        longtail.restore_labels(["item-7"])
        assert everything(longtail) == plain
        with pytest.raises(NotFoundError):
            longtail.restore_labels([NEW.id])

        was = longtail.label("item-9")
        longtail.add_labels(NewLabel("item-9", {**NEW.features, "item_id": "unheard of"}, {"title": "Other"}))
        label = longtail.label("item-9")
        assert label == {**was, "display": {"title": "Other"}, "request_id": label["request_id"]}
        by_hand = (
            float(reference.query() @ reference.new()) / reference.temperature + was["log_pn"] + (was["bias"] or 0)
        )
        assert everything(longtail, allow=["item-9"], bias_removal=1)["item-9"] == pytest.approx(
            by_hand, rel=1e-4, abs=1e-4
        )
        assert longtail.monitoring()["labels"] == {"added": 0, "hidden": 0, "available": 60}


@pytest.mark.parametrize("end", [pytest.param("terminate", marks=pytest.mark.nightly), "kill"])
def test_label_changes_survive_restart_and_new_release(root: Path, tmp_path: Path, end: str) -> None:
    with serving(root, tmp_path / "state") as (process, longtail):
        longtail.add_labels([NEW, NewLabel("brief", {})])
        longtail.delete_label("item-7")
        longtail.delete_label("brief")
        before = everything(longtail)
        if end == "kill":
            process.process.kill()
            process.process.wait()
        else:
            assert process.terminate() == 0
    with serving(root, tmp_path / "state") as (_, longtail):
        assert everything(longtail) == before
        assert longtail.monitoring()["labels"] == {"added": 1, "hidden": 1, "available": 60}
        open_releases(root / "releases").publish("second")
        until(lambda: longtail.release()["name"] == "second", "the next release")
        reference = ColdReference(root / "second")
        of_new = everything(longtail, allow=[NEW.id, "brief", "item-7"], bias_removal=1)
        assert of_new == {NEW.id: pytest.approx(reference.score(reference.new(), 1), rel=1e-4, abs=1e-4)}
        open_releases(root / "releases").rollback()
        until(lambda: longtail.release()["name"] == "first", "the release before")
        assert everything(longtail) == before


def test_merge_and_rebuild_include_label_changes(root: Path, tmp_path: Path) -> None:
    name = f"merged-{tmp_path.name}"
    with serving(root, tmp_path / "state") as (_, longtail):
        longtail.add_labels([NEW, NewLabel("item-9", label_features(2))])
        longtail.delete_label("item-7")
        before = everything(longtail, bias_removal=1)
        log, merged = tmp_path / "state", tmp_path / "merged"
        output = longtail_index("merge", root / "releases/first/bundle", log, "--out", merged)
        assert "60 labels: 1 added, 1 changed, 1 removed" in output
        longtail_index("build", merged, "--releases", root / "releases", "--spec", "flat", "--name", name, "--publish")
        until(lambda: longtail.release()["name"] == name, "the merged release")
        assert longtail.release()["labels"] == LABELS
        assert longtail.monitoring()["labels"] == {"added": 0, "hidden": 0, "available": 60}
        after = everything(longtail, bias_removal=1)
        assert list(after) == list(before)
        # One constant more for every label: log p_n sums to 1 over the labels that are there now.
        assert max(after[id_] - before[id_] for id_ in before) - min(after[id_] - before[id_] for id_ in before) < 1e-4
        assert longtail.label(NEW.id)["display"] == {"title": "Neu"}
        longtail.delete_label(NEW.id)
        assert NEW.id not in everything(longtail)
        assert longtail.monitoring()["labels"] == {"added": 0, "hidden": 1, "available": 59}


def test_updated_labels_keep_their_bucket(root: Path, tmp_path: Path) -> None:
    table = feather.read_table(root / "first" / "labels.arrow").to_pydict()
    heads = [id_ for id_, bucket in zip(table["label_id"], table["bucket"], strict=True) if bucket == 0][:5]
    with serving(root, tmp_path / "state") as (_, longtail):
        longtail.add_labels([NewLabel(id_, label_features(row)) for row, id_ in enumerate(heads)])
        longtail.retrieve(features=FEATURES, k=5, allow=heads)
        longtail.feedback(Feedback(None, heads, FEATURES))
        window = longtail.monitoring()["windows"]["5m"]
        # A label that only another release can serve is deleted all the same.
        releases = open_releases(root / "releases")
        longtail.add_labels([NEW])
        releases.publish("bare", force=True)
        longtail.reload()
        longtail.delete_label(NEW.id)
        releases.publish("first")
        longtail.reload()
        with pytest.raises(NotFoundError):
            longtail.label(NEW.id)
    assert window["exposures"]["head"]["count"] == 5
    assert window["exposures"]["head"]["coverage"] > 0
    positives = {bucket: of["positives"] for bucket, of in window["recall"]["organic"].items()}
    assert positives == {"head": 5, "torso": 0, "tail": 0, "new": 0, "all": 5}


def test_release_with_broken_label_tower_is_refused(tmp_path: Path) -> None:
    replace(make_bundle(label_tower=True), label_tower=b"not ONNX").write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", spec=IndexSpec("flat"), name="broken")
    with pytest.raises(UnservableReleaseError, match=r"label_tower\.onnx"):
        load_release(open_releases(tmp_path / "releases"), "broken")
