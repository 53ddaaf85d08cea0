"""The prior `exposed`: shares of places in a service's own answers, from events to scores."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Upsert
from longtail.bundle.priors import ExposureState
from longtail.index import PriorsError, PriorSpec, PriorTable, Releases, build, open_releases
from longtail.index.errors import NothingNewError
from longtail.serving import Settings
from longtail.serving.core.description import release_json
from longtail.serving.core.queries import RetrieveQuery
from longtail.serving.errors import InvalidRequestError
from longtail.serving.events.schema import event_json
from longtail.serving.refresh import refresh
from longtail.state import LabelStore
from tests.bundles import label_features, make_bundle
from tests.serving.plane import make_retriever, read_results

L, DAY = 60, 86_400.0


def write_answers(state: Path, name: str, answers: list[tuple[float, list[str], dict[str, Any]]]) -> None:
    """Write answers, each at a time with labels and further columns, as a worker's segment of events."""
    (state / "events").mkdir(exist_ok=True)
    lines = [
        event_json(kind="answer", time=at, answered_at=at, labels=labels, **more) + b"\n"
        for at, labels, more in answers
    ]
    (state / "events" / f"{name}.jsonl").write_bytes(b"".join(lines))


def get_values(exposed_releases: Releases, name: str) -> dict[str, float]:
    bundle = exposed_releases.open(name).bundle
    return dict(zip(bundle.labels.ids.to_pylist(), bundle.priors.values_LP[:, -1].tolist(), strict=True))


@pytest.fixture
def exposed_releases(tmp_path: Path) -> Releases:
    """A release with the prior, without forecast and co-occurrence, and without answers so far."""
    make_bundle(labels=L, label_tower=True, popularity=True).write(tmp_path / "bundle")
    build(tmp_path / "bundle", tmp_path / "releases", name="first", priors=PriorSpec(exposed="1d"))
    releases = open_releases(tmp_path / "releases")
    releases.publish("first")
    return releases


def test_exposure_decays_equally_in_one_or_two_steps() -> None:
    state, none = ExposureState(half_life=DAY), np.zeros(2, np.float32)
    first, exposures_L = state.counted(none, np.array([6.0, 2.0]), 10 * DAY)
    assert (first.mean, first.until) == (4, 10 * DAY)
    np.testing.assert_allclose(first.values(exposures_L), np.log([7 / 5, 3 / 5]))
    values_L = first.values(exposures_L).astype(np.float32)
    second, exposures_L = first.counted(values_L, np.array([0.0, 3.0]), 11 * DAY)
    np.testing.assert_allclose(exposures_L, [3, 4], rtol=1e-6)
    np.testing.assert_allclose(second.values(exposures_L), np.log([4 / 4.5, 5 / 4.5]), rtol=1e-6)


def test_answers_become_the_prior_of_the_next_release(
    exposed_releases: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(get_values(exposed_releases, "first").values()) == {0.0}
    (before,) = release_json(make_retriever(exposed_releases.open("first").bundle, "flat"))["priors"]
    exposure = {"half_life": "24h", "until": None, "mean": 0.0}
    assert before == {"name": "exposed", "minimum": -1, "default": 0, "maximum": 1, "exposure": exposure}
    settings = Settings(releases=exposed_releases.root, state=tmp_path, answer_share=0.5)
    now = time.time() - 60
    of_run = {"run": "r", "arm": "a", "unit": 1}
    write_answers(tmp_path, "one", [(now, ["item-1", "item-2"], {}), (now, ["item-1"], of_run)])
    second = refresh(settings)

    bundle = exposed_releases.open(second).bundle
    assert bundle.priors.exposed is not None
    state = bundle.priors.exposed[1]
    assert state.until is not None
    aged = 2 ** ((now - state.until) / DAY)
    mean = 2.5 * aged / L
    expected = {f"item-{row}": -np.log(mean + 1) for row in range(L)}
    expected["item-1"] += np.log(1.5 * aged + 1)  # half of the answers without an experiment are events
    expected["item-2"] += np.log(aged + 1)
    assert get_values(exposed_releases, second) == pytest.approx(expected, abs=1e-6)
    assert state.mean == pytest.approx(mean)

    # The same events again add nothing, and a label that the service added since then has had no place.
    with pytest.raises(NothingNewError, match="expected pairs or answers later than those it knows"):
        refresh(settings)
    LabelStore(tmp_path).append([Upsert(id="new", at=datetime.now(UTC), features=label_features(3))])
    write_answers(tmp_path, "two", [(state.until + 1e-3, ["item-2", "unknown"], {})])
    clock = SimpleNamespace(time=lambda: now + 90, gmtime=lambda: time.gmtime(now + 90), strftime=time.strftime)
    monkeypatch.setattr("longtail.serving.refresh.time", clock)
    third = exposed_releases.open(refresh(settings)).bundle
    assert third.priors.exposed is not None
    mean = third.priors.exposed[1].mean
    assert mean == pytest.approx((2.5 * aged + 1) / (L + 1), rel=1e-3)
    assert third.priors.values_LP[third.labels.rows_by_id["new"], -1] == pytest.approx(-np.log(mean + 1), abs=1e-6)


def test_requests_weigh_exposure_as_numpy_does(
    exposed_releases: Releases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time() - 60
    write_answers(tmp_path, "one", [(now, [f"item-{row}" for row in range(rank)], {}) for rank in range(L)])
    bundle = exposed_releases.open(refresh(Settings(releases=exposed_releases.root, state=tmp_path))).bundle
    assert "LONGTAIL_ANSWER_SHARE is 0: the prior exposed knows the answers of experiments alone" in caplog.text
    added = Upsert(id="new", at=datetime(2026, 1, 2, tzinfo=UTC), features=label_features(3))
    served = make_retriever(bundle, "flat", added)
    query = {"features": {"user_id": "u1"}, "k": L + 1, "bias_removal": 0, "popularity": 0}
    plain, weighed = (
        {label["id"]: label["score"] for label in result["labels"]}
        for result in read_results(
            served.retrieve(
                [RetrieveQuery.model_validate(query | more) for more in ({}, {"priors": {"exposed": -0.5}})]
            )
        )
    )
    values_L = bundle.priors.values_LP[:, -1]
    differences = {id_: weighed[id_] - score for id_, score in plain.items()}
    expected = dict(zip(bundle.labels.ids.to_pylist(), -0.5 * values_L, strict=True))
    expected["new"] = -0.5 * values_L.min()  # as item-59, which was in no answer
    assert differences == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InvalidRequestError, match=r"expected -1\.0 <= priors\.exposed <= 1\.0, received -1\.5"):
        served.retrieve([RetrieveQuery.model_validate(query | {"priors": {"exposed": -1.5}})])


def test_a_new_model_keeps_the_exposures_of_the_published_release(exposed_releases: Releases, tmp_path: Path) -> None:
    write_answers(tmp_path, "one", [(time.time() - 60, ["item-1", "item-50"], {})])
    published = refresh(Settings(releases=exposed_releases.root, state=tmp_path))
    make_bundle(labels=40, label_tower=True).write(tmp_path / "another")
    build(tmp_path / "another", exposed_releases.root, name="another", priors=PriorSpec(exposed="7d"), spec="flat")
    published_values, values = get_values(exposed_releases, published), get_values(exposed_releases, "another")
    assert values["item-1"] - values["item-2"] == pytest.approx(
        published_values["item-1"] - published_values["item-2"], abs=1e-5
    )
    (prior,) = exposed_releases.open("another").bundle.priors.settings[-1:]
    earlier = exposed_releases.open(published).bundle.priors.settings[-1].exposure
    assert prior.exposure is not None
    assert earlier is not None
    assert (prior.exposure.half_life, prior.exposure.until) == (7 * DAY, earlier.until)
    exposed_releases.publish("another")


@pytest.mark.parametrize("half_life", ["7", "7d=-1:1"])
def test_invalid_half_lives_of_exposure_are_refused(half_life: str, tmp_path: Path) -> None:
    bundle = make_bundle(labels=L).write(tmp_path / "bundle")
    with pytest.raises(PriorsError, match="expected"):
        build(bundle, tmp_path / "releases", priors=PriorSpec(exposed=half_life))


def test_no_other_prior_has_its_name(tmp_path: Path) -> None:
    bundle = make_bundle(labels=L).write(tmp_path / "bundle")
    pq.write_table(pa.table({"label_id": bundle.labels.ids, "exposed": np.arange(L)}), tmp_path / "t.parquet")
    with pytest.raises(PriorsError, match="a prior named 'exposed' is not allowed, because"):
        PriorTable(tmp_path / "t.parquet").read(bundle, progress=lambda _: None)
