from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bundles import make_bundle

RUN = """
import sys
from pathlib import Path
from longtail.bundle import Bundle, Tower
bundle = Bundle.load(Path(sys.argv[1]))
manifest = bundle.manifest
tower = Tower(bundle.query_tower, manifest.query_features, bundle.vocabularies, manifest.dim, file="query")
assert tower.embed(tower.read([tower.example()])).shape == (1, manifest.dim)
"""


@pytest.mark.process
def test_a_tower_that_runs_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    bundle = make_bundle().write(tmp_path / "bundle").path
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", RUN, str(bundle)], check=True, env=environment)
    assert list((tmp_path / "temporary").iterdir()) == []
