"""The serving process never loads the trainer or a training framework."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

_PROGRAM = """
import sys

BLOCKED = ("keras", "tensorflow", "jax", "tf2onnx", "longtail.trainer")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ImportError(f"serving must not import {name}")

sys.meta_path.insert(0, Block())

from pathlib import Path
from longtail.index import IndexSpec, build, open_releases
from longtail.serving import Settings, create_app
from longtail.serving.core.follower import load_release
from tests.bundles import make_bundle
from tests.serving.client import open_client

root = Path(sys.argv[1])
make_bundle().write(root / "bundle")
build(root / "bundle", root / "releases", spec=IndexSpec("flat"), name="only")
retriever = load_release(open_releases(root / "releases"), "only")
with open_client(create_app(Settings(releases=root), retriever=retriever)) as client:
    answer = client.post("/v1/retrieve", json={"queries": [{"features": {"user_id": "u1"}, "k": 3}]})
assert len(answer.json()["results"][0]["labels"]) == 3, answer.text
import longtail.serving.cli
loaded = [name for name in sys.modules if name.startswith(BLOCKED)]
assert not loaded, loaded
print("answered")
"""


def test_serving_answers_where_training_frameworks_cannot_be_imported(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (result.returncode, result.stdout) == (0, "answered\n"), result.stderr
