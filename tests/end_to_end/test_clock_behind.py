"""A service whose clock is behind the trainer's: what it has acknowledged of labels counts all the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from longtail.bundle import Bundle
from longtail.index import Releases, build, merge_labels
from longtail.state import LabelStore
from tests.bundles import label_features, make_bundle
from tests.serving.process import ServerProcess, server, until

DAY = timedelta(days=1)


def bundle_read(at: datetime, path: Path) -> Path:
    """A bundle of the same labels whose data was read at a time."""
    bundle = make_bundle(label_tower=True)
    manifest = bundle.manifest.model_copy(
        update={"created_at": at, "training_data": bundle.manifest.training_data | {"read_at": at.isoformat()}}
    )
    replace(bundle, manifest=manifest).write(path)
    return path


def publish(bundle: Path, releases: Path, name: str) -> None:
    build(bundle, releases, spec="flat", name=name)
    Releases(releases).publish(name)


def wait_for(process: ServerProcess, name: str) -> None:
    until(lambda: httpx.get(f"{process.url}/v1/release").json()["name"] == name, f"{name} in service")


def embed_anew(process: ServerProcess, id_: str, title: str) -> None:
    label = {"id": id_, "features": label_features(7), "display": {"title": title}}
    said = httpx.post(f"{process.url}/v1/labels", json={"labels": [label]})
    assert said.status_code == 200, said.text


def title(process: ServerProcess, id_: str) -> str:
    return str(httpx.get(f"{process.url}/v1/labels/{id_}").json()["display"]["title"])


def dates_in(state: Path) -> list[datetime]:
    """Of all changes, in their order."""
    with closing(LabelStore(state)) as store:
        return [record.at for record in store.read_from().records]


def test_a_change_counts_for_the_release_that_it_was_made_under_and_for_no_later_one(tmp_path: Path) -> None:
    releases, state = tmp_path / "releases", tmp_path / "releases" / ".state"
    tomorrow = datetime.now(UTC) + DAY
    publish(bundle_read(tomorrow, tmp_path / "first"), releases, "first")
    with server(releases, tmp_path / "log", poll_seconds=0.05) as process:
        process.wait_until_ready(60)
        embed_anew(process, "item-3", "changed")
        assert title(process, "item-3") == "changed"
        # A merge takes it in, and nothing is scored beside the index any more.
        merge_labels(tmp_path / "first", state, tmp_path / "merged")
        # Asked for after the merge, while the release from before it serves still.
        embed_anew(process, "item-4", "changed since")
        publish(tmp_path / "merged", releases, "merged")
        wait_for(process, "merged")
        assert (title(process, "item-3"), title(process, "item-4")) == ("changed", "changed since")
        # Trained anew with data read later: the model knows what was changed before.
        publish(bundle_read(tomorrow + DAY, tmp_path / "second"), releases, "second")
        wait_for(process, "second")
        assert title(process, "item-3") == title(process, "item-4").replace("4", "3") == "Title 3"
        embed_anew(process, "item-3", "again")
        assert title(process, "item-3") == "again"
        assert process.terminate() == 0
    # The same after a restart, and after going back.
    Releases(releases).publish("first", force=True)
    with server(releases, tmp_path / "log") as process:
        process.wait_until_ready(60)
        assert (title(process, "item-3"), title(process, "item-4")) == ("again", "changed since")
    dates = dates_in(state)
    assert dates == sorted(set(dates))
    assert Bundle.load(tmp_path / "merged").manifest.data_until == dates[0]


def test_the_clock_counts_where_it_is_not_behind(tmp_path: Path) -> None:
    publish(bundle_read(datetime.now(UTC) - DAY, tmp_path / "first"), tmp_path / "releases", "first")
    with server(tmp_path / "releases", tmp_path / "log") as process:
        process.wait_until_ready(60)
        before = datetime.now(UTC)
        embed_anew(process, "item-3", "changed")
        after = datetime.now(UTC)
        assert title(process, "item-3") == "changed"
    (date,) = dates_in(tmp_path / "releases" / ".state")
    assert before <= date <= after
