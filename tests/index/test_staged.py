"""Staging a release."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtail.index import (
    LongtailIndexError,
    ReleaseNotFoundError,
    Releases,
    build,
)
from tests.bundles import make_bundle


@pytest.fixture
def shelf(tmp_path: Path) -> Releases:
    bundle = make_bundle(labels=60).write(tmp_path / "model")
    for name in ("first", "second", "third"):
        build(bundle, tmp_path / "r", name=name)
    shelf = Releases(tmp_path / "r")
    shelf.publish("first")
    return shelf


def test_staging_is_a_pointer_that_publishing_clears(shelf: Releases) -> None:
    assert shelf.staged() is None
    shelf.stage("second")
    assert (shelf.staged(), shelf.current()) == ("second", "first")
    assert shelf.prune(keep=1) == []
    shelf.publish("third")
    assert shelf.staged() == "second"
    shelf.publish("second")
    assert shelf.staged() is None
    shelf.stage("first")
    assert (shelf.unstage(), shelf.unstage()) == ("first", None)
    with pytest.raises(LongtailIndexError, match="stage: expected another release than CURRENT, received 'second'"):
        shelf.stage("second")
    with pytest.raises(ReleaseNotFoundError):
        shelf.stage("fourth")
