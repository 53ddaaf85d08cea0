from collections.abc import Iterator
from pathlib import Path

import pytest

import longtail
from longtail.index import build, publish
from longtail.serving.process.background import BackgroundServer
from tests.bundles import make_bundle


@pytest.fixture(scope="package")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a published release of 60 labels, which has co-occurrence and remembers nobody."""
    folder = tmp_path_factory.mktemp("door")
    bundle = make_bundle(cooccurrence=True).write(folder / "bundle")
    publish(folder / "releases", build(bundle, folder / "releases", name="first").name)
    return folder / "releases"


@pytest.fixture(scope="package")
def model(releases: Path) -> longtail.Model:
    return longtail.load(releases)


@pytest.fixture(scope="package")
def service(releases: Path) -> Iterator[str]:
    """The address of a service of that release, loaded for itself."""
    with BackgroundServer(longtail.load(releases).retriever) as server:
        yield server.url
