"""Mark tests that `make quick` skips, and start slow files first.

The mark `process` is for tests that start processes or a browser, `slow` for tests that take seconds. PROCESS_FOLDERS
marks whole folders. An unmarked test fails when it starts a process.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.s3 import S3Server

# pytest-xdist already uses every core; more threads of FAISS and BLAS would only compete.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# `longtail-train` sets this too, but some tests import TensorFlow before the trainer is imported.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
# Errors of tf2onnx fail tests; with "TRUE" it also copies the graph before each optimiser, to restore it.
os.environ["TF2ONNX_CATCH_ERRORS"] = "FALSE"

# The first call starts a process. Libraries call it on import, which would fail an unmarked test.
platform.processor()

# Scanning half a million objects of TensorFlow and the tests, none of them garbage, would take a fifth of collection
# time. `_freeze_imports` turns garbage collection on again.
gc.disable()

if find_spec("hypothesis"):  # the environments of TFRS and PyTorch lack it
    import hypothesis

    # A deadline would fail examples on a busy machine.
    hypothesis.settings.register_profile("suite", deadline=None)
    hypothesis.settings.load_profile("suite")

HERE = Path(__file__).parent
PROCESS_FOLDERS = tuple(
    HERE / folder for folder in ("docker", "end_to_end", "examples", "serving/dashboard", "tfrs", "torch")
)
LONG_FILES = (
    "end_to_end/test_doors.py", "end_to_end/test_train_to_serve.py", "test_packaging.py", "end_to_end/test_ledger.py",
    "trainer/test_sequences.py", "trainer/test_tune.py", "index/test_milvus.py", "trainer/test_model.py",
    "end_to_end/test_replicas.py", "trainer/test_blocks.py", "trainer/test_implied_noise.py",
    "end_to_end/test_batch.py", "trainer/test_init.py", "trainer/test_compiled.py", "end_to_end/test_workers.py",
    "end_to_end/test_hostile.py", "trainer/test_several_objectives.py", "trainer/test_refreshed_forecast.py",
    "index/test_remote.py", "trainer/test_top_k.py", "trainer/test_objective.py", "trainer/test_nearest.py",
)  # fmt: skip
"""Files that need 10 s of CPU or wait 30 s. They start first, so that no core idles at the end. `make test` stops
pytest-xdist from sorting files by number of tests, which would start most of these last."""


def other_python(package: str, variable: str, target: str) -> str:
    """Return the Python of another environment, whose path is in an environment variable that `target` sets."""
    path = os.environ.get(variable)
    if path is None:
        pytest.fail(f"expected {variable}, a Python with {package}; `{target}` sets it")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item.path for item in items}  # compare parents once per file, not once per test
    processes = {file for file in files if any(folder in file.parents for folder in PROCESS_FOLDERS)}
    for item in items:
        if item.path in processes:
            item.add_marker(pytest.mark.process)
    rank = {HERE / name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.fixture(autouse=True, scope="session")
def _freeze_imports() -> Iterator[None]:
    """Exclude imported objects from garbage collection. The service unfreezes and scans them whenever it loads a
    release; tests load hundreds of releases, so that is turned off."""
    gc.collect()
    gc.freeze()
    gc.enable()
    with pytest.MonkeyPatch.context() as patched:
        if follower := sys.modules.get("longtail.serving.core.follower"):
            patched.setattr(follower, "_freeze", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _require_process_mark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("process") is None:

        def refuse(_: object, command: object, *__: object, **___: object) -> None:
            pytest.fail(f"expected the mark `process` on a test that starts one, found {command}")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server for all tests of this process."""
    import boto3

    from tests.s3 import BUCKET, S3Server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server()
    with pytest.MonkeyPatch.context() as patched:
        for name, value in server.environment.items():
            patched.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, and a new download cache for each test."""
    for name, value in {**s3_server.environment, "LONGTAIL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    s3_server.requests.clear()
    return s3_server
