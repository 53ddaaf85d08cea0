"""Which tests `make quick` leaves out, and which files begin first.

`process`: starts other processes, a browser among them. Whole folders are marked here, single tests where they stand;
an unmarked test that starts one fails, so that the mark cannot be forgotten. `slow`: takes seconds.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.s3 import S3Server

# pytest-xdist has a process to every core: more threads of FAISS and BLAS would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `longtail-train` sets it: some tests import TensorFlow before those of the trainer are collected.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
# What fails in tf2onnx is not passed over, so it copies no graph before each of its optimisers to go back to.
os.environ["TF2ONNX_CATCH_ERRORS"] = "FALSE"

# Python starts a process for it, once; libraries ask when they are imported, in whichever test that is.
platform.processor()

# TensorFlow and thousands of tests are half a million objects, and none is garbage yet: a fifth of the time of
# collection. `_what_is_imported_stays` turns it on again.
gc.disable()

# A busy machine would fail an example by its time alone.
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
"""Ten seconds of CPU each, or half a minute of waiting. They begin first, so that no core waits at the end for one
that has just begun; `make test` keeps pytest-xdist from sorting files by how many tests they have, which puts most of
these last."""


def python_with(package: str, variable: str, made_by: str) -> str:
    """The Python of another environment, which an environment variable names."""
    path = os.environ.get(variable)
    if path is None:
        pytest.fail(f"expected {variable}, a Python with {package}; `{made_by}` sets it")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files = {item.path for item in items}  # a file's parents are compared once, not for each of its tests
    processes = {file for file in files if any(folder in file.parents for folder in PROCESS_FOLDERS)}
    for item in items:
        if item.path in processes:
            item.add_marker(pytest.mark.process)
    rank = {HERE / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.fixture(autouse=True, scope="session")
def _what_is_imported_stays() -> Iterator[None]:
    """The garbage collector passes over what was imported and collected. A service has it look at all there are
    whenever it loads a release; where tests load hundreds in this process, it does not."""
    gc.collect()
    gc.freeze()
    gc.enable()
    with pytest.MonkeyPatch.context() as patched:
        if follower := sys.modules.get("longtail.serving.core.follower"):
            patched.setattr(follower, "_freeze", lambda: None)
        yield


@pytest.fixture(autouse=True)
def _processes_are_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("process") is None:

        def refuse(_: object, command: object, *__: object, **___: object) -> None:
            pytest.fail(f"expected the mark `process` on a test that starts one, found {command}")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One for all tests of this process."""
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
    """The server, with a cache of downloads of the test's own."""
    for name, value in {**s3_server.environment, "LONGTAIL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    s3_server.seen.clear()
    return s3_server
