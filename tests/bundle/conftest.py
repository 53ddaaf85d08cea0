from pathlib import Path

import pytest

from tests.bundles import make_bundle


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A bundle on disk: 12 labels, d = 4, label bias, a label tower and a report."""
    bundle = make_bundle(labels=12, dim=4, users=5, bias=True)
    object.__setattr__(bundle, "label_tower", b"a label tower")
    object.__setattr__(bundle, "reports", {"metrics.json": b"{}"})
    bundle.write(tmp_path / "bundle")
    return tmp_path / "bundle"
