"""A bundle whose embedding tables lie beside its towers, from an index build to answers, added labels and a merge."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx

from longtail.bundle import Bundle
from longtail.index import Releases, build, merge_labels
from tests.bundles import label_features, make_bundle, tables_apart
from tests.serving.process import server, until

QUERIES = [{"features": {"user_id": f"u{row}", "history": [f"item-{row}", "new"]}, "k": 20} for row in range(8)]


def answers(url: str) -> list[list[tuple[str, float]]]:
    said = httpx.post(f"{url}/v1/retrieve", json={"queries": QUERIES})
    assert said.status_code == 200, said.text
    results: list[dict[str, Any]] = said.json()["results"]
    return [[(label["id"], label["score"]) for label in result["labels"]] for result in results]


def test_it_is_served_as_the_bundle_whose_towers_hold_their_tables(tmp_path: Path) -> None:
    whole, found = make_bundle(label_tower=True), {}
    (tmp_path / "export").mkdir()
    for name, bundle in (("whole", whole), ("apart", tables_apart(whole, tmp_path / "export"))):
        bundle.write(tmp_path / name)
        releases = tmp_path / f"{name}-releases"
        build(tmp_path / name, releases, spec="flat", name="first")
        Releases(releases).publish("first")
        if name == "apart":
            shutil.rmtree(tmp_path / "export")
        with server(releases, tmp_path / f"{name}.log", poll_seconds=0.05) as process:
            process.wait_until_ready(60)
            label = {"id": "new", "features": label_features(7), "display": {"title": "New"}}
            added = httpx.post(f"{process.url}/v1/labels", json={"labels": [label]})
            assert added.status_code == 200, added.text
            found[name] = answers(process.url)
            merge_labels(tmp_path / name, releases / ".state", tmp_path / f"{name}-merged")
            shutil.rmtree(tmp_path / name)
            build(tmp_path / f"{name}-merged", releases, spec="flat", name="second")
            Releases(releases).publish("second")
            until(lambda: httpx.get(f"{process.url}/v1/release").json()["name"] == "second", "the merged release")
            found[f"{name}, merged"] = answers(process.url)
    assert any(id_ == "new" for labels in found["whole"] for id_, _ in labels)
    assert found["apart"] == found["whole"]
    assert found["apart, merged"] == found["whole, merged"]
    assert sorted(Bundle.load(tmp_path / "apart-merged").tables) == ["genres", "items", "own", "users"]
