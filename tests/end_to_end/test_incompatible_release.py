"""A release that refuses what clients send, refused by publish and the service; the service keeps labels, too."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from longtail.bundle import Bundle
from longtail.client import Client, LongtailError, NewLabel, NotFoundError
from longtail.index import build, open_releases
from longtail.index.cli import main
from longtail.index.release.compatibility import ClientInputs, breaking_changes
from tests.bundles import make_bundle
from tests.end_to_end.killing import server
from tests.serving.process import ServerProcess, until

FEATURES = {"user_id": "u3", "history": ["item-1"]}


def without_history(bundle: Bundle) -> Bundle:
    """The bundle of a recipe that forgot a feature: users alone."""
    users = np.random.default_rng(5).standard_normal((21, 8), dtype=np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["users", "user_id"], ["user"]),
            helper.make_node("LpNormalization", ["user"], ["embedding"], axis=1, p=2),
        ],
        "query_tower",
        [helper.make_tensor_value_info("user_id", TensorProto.INT32, ["B"])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["B", 8])],
        [numpy_helper.from_array(users, "users")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    manifest = bundle.manifest
    features = [feature for feature in manifest.query_features if feature.name != "history"]
    return replace(
        bundle,
        manifest=manifest.model_copy(update={"query_features": features}),
        query_tower=model.SerializeToString(),
    )


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    """`first` is published; `narrow` has one query feature less, `bare` no label tower, `second` is as good."""
    root = tmp_path / "releases"
    for name, bundle in (
        ("first", make_bundle(label_tower=True)),
        ("second", make_bundle(label_tower=True, seed=1)),
        ("narrow", without_history(make_bundle(label_tower=True, seed=2))),
        ("bare", make_bundle(seed=3)),
    ):
        bundle.write(tmp_path / name)
        build(tmp_path / name, root, spec="flat", name=name)
    open_releases(root).publish("first")
    return root


@pytest.fixture
def service(releases: Path, tmp_path: Path) -> Iterator[tuple[ServerProcess, Client]]:
    """A service in a process of its own, and a client with the key that may add labels."""
    settings = {"admin_keys": "admin-key-of-sixteen", "api_keys": "asker-key-of-sixteen", "poll_seconds": 0.05}
    with server(releases, tmp_path / "log", **settings) as process:
        process.wait_until_ready(90)
        with Client(process.url, "admin-key-of-sixteen", retries=0) as client:
            yield process, client


def publish(releases: Path, name: str, *options: str) -> tuple[int, str]:
    """Run `longtail-index publish`; its exit code and what it says on stderr."""
    with redirect_stderr(io.StringIO()) as stderr, pytest.raises(SystemExit) as ended:
        main(["publish", f"{releases}/{name}", *options])
    return int(ended.value.code or 0), stderr.getvalue()


def test_a_missing_feature(releases: Path, service: tuple[ServerProcess, Client]) -> None:
    _, client = service
    code, stderr = publish(releases, "narrow")
    assert code == 2
    assert "narrow is not published, CURRENT stays as it was" in stderr
    assert "query feature 'history'" in stderr
    assert open_releases(releases).current() == "first"
    # Somebody points CURRENT at it all the same: the service says no, and goes on.
    (releases / "CURRENT").write_text('{"current": "narrow"}')
    with pytest.raises(LongtailError) as caught:
        client.reload()
    assert caught.value.type == "release_refused"
    assert client.retrieve(features=FEATURES).release == "first"
    # By force it is published and served. This is what happened without a word before: ready, and 422 for everybody.
    (releases / "CURRENT").write_text('{"current": "first", "history": ["first"]}')
    code, stderr = publish(releases, "narrow", "--force")
    assert code == 0
    assert "query feature 'history'" in stderr
    until(lambda: client.release()["name"] == "narrow", "the forced release to be served")
    with pytest.raises(LongtailError) as caught:
        client.retrieve(features=FEATURES)
    assert caught.value.field == "queries.0.features.history"
    # Going back needs no force, and a release that takes as much as the one before none either.
    open_releases(releases).rollback()
    until(lambda: client.release()["name"] == "first", "the release before to be served")
    assert publish(releases, "second")[0] == 0
    until(lambda: client.release()["name"] == "second", "the next release to be served")
    assert client.retrieve(features=FEATURES).release == "second"


def test_dropped_labels(releases: Path, service: tuple[ServerProcess, Client], tmp_path: Path) -> None:
    _, client = service
    assert publish(releases, "bare")[0] == 0
    until(lambda: client.release()["name"] == "bare", "a release that drops no label to be served")
    assert publish(releases, "first")[0] == 0
    until(lambda: client.release()["name"] == "first", "the first release to be served")
    client.add_labels(NewLabel("brand new", {"genres": ["g1"], "year": 1}, {"title": "New"}))
    # A publisher does not see the service's state; the service refuses what drops its labels.
    assert publish(releases, "bare")[0] == 0
    with pytest.raises(LongtailError) as caught:
        client.reload()
    assert caught.value.type == "release_refused"
    assert "1 labels added while serving would be dropped: 'brand new' (" in (tmp_path / "log").read_text()
    assert client.label("brand new")["bucket"] == "new"
    assert publish(releases, "bare", "--force")[0] == 0
    until(lambda: client.release()["name"] == "bare", "the forced release to be served")
    with pytest.raises(NotFoundError):
        client.label("brand new")


def test_features_with_changed_kinds_are_refused() -> None:
    manifest = make_bundle().manifest
    user, history = manifest.query_features

    def refused(before: object, after: object) -> list[str]:
        return breaking_changes(
            ClientInputs(manifest.model_copy(update={"query_features": [before]})),
            ClientInputs(manifest.model_copy(update={"query_features": [after]})),
        )

    bag = history.model_copy(update={"kind": "bag"})
    number = user.model_copy(update={"kind": "number", "vocabulary": None})
    # A bag takes every history, a history not every bag; an id takes every number.
    assert refused(history, bag) == []
    assert "found a list of ids (strings, numbers or booleans), oldest first" in refused(bag, history)[0]
    assert refused(number, user) == []
    assert "expected an id" in refused(user, number)[0]
    joined = bag.model_copy(update={"separator": "|"})
    assert refused(bag, joined) == []
    assert "a string of ids with '|' between them, as in the published" in refused(joined, bag)[0]
    # A vector is refused whole if its length is another.
    narrow, wide = (user.model_copy(update={"kind": "vector", "vocabulary": None, "dims": dims}) for dims in (8, 16))
    assert refused(narrow, narrow) == []
    assert (
        "expected a list of 8 finite numbers, as in the published release, found a list of 16"
        in refused(narrow, wide)[0]
    )
    # More features are no loss.
    fewer = manifest.model_copy(update={"query_features": [user]})
    assert breaking_changes(ClientInputs(fewer), ClientInputs(manifest)) == []
