"""What a release takes of a worker's own memory, and that swaps give it back."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from longtail.bundle import Bundle, Labels
from longtail.serving.core.catalogue import Catalogue
from tests.bundles import make_bundle
from tests.serving.releases import synthetic_release

COUNT = 50_000
SWAPS = """
import gc, sys
from longtail.index import Releases
from longtail.serving.core.heap import give_back_memory
from longtail.serving.core.loader import load_release

releases, held = Releases(sys.argv[1]), []
for swap in range(21):
    held = [*held, load_release(releases, releases.current())][-2:]
    gc.collect()
    give_back_memory()
    if swap in (6, 20):
        print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("RssAnon")))
"""


def test_a_label_takes_bytes_and_no_objects() -> None:
    labels = Labels(
        ids=pa.array([f"item-{row}" for row in range(COUNT)]),
        counts=np.ones(COUNT, np.int64),
        log_pn=np.full(COUNT, -np.log(COUNT), np.float32),
        buckets=np.zeros(COUNT, np.int8),
        bias=None,
        display=pa.table({"title": [f"Title of the label {row}" for row in range(COUNT)]}),
    )
    Catalogue(make_bundle().labels, np.zeros((60, 1), np.float32)).json_beginnings(np.arange(9))  # imports on first use
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    catalogue = Catalogue(labels, np.zeros((COUNT, 1), np.float32))
    assert catalogue.rows(["item-49999", "x"])[0].tolist() == [49_999]
    catalogue.json_beginnings(np.arange(100))
    held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - arrow
    tracemalloc.stop()
    assert held / COUNT <= 30


def test_shown_labels_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtail.serving.core.catalogue._MAX_KEPT", 50)
    bundle = make_bundle(labels=400)
    catalogue = Catalogue(bundle.labels, bundle.embeddings)
    for start in range(0, 400, 40):
        shown = catalogue.json_beginnings(np.arange(start, start + 40))
        assert shown[-1].startswith(f'{{"id":"item-{start + 39}","bucket"'.encode())
        assert len(catalogue._json_of_row) <= 50


def test_a_history_over_the_labels_shares_their_ids(tmp_path: Path) -> None:
    bundle = make_bundle().write(tmp_path / "bundle")
    loaded = Bundle.load(tmp_path / "bundle", towers=False)
    assert loaded.vocabularies["items"].ids is loaded.labels.ids
    assert loaded.vocabularies["items"].lookup_all(["item-3", "x"]) == [4, 0]
    assert loaded.vocabularies["users"].lookup("u0") == 1
    assert (loaded.query_tower, loaded.query_model) == (b"", tmp_path / "bundle" / "query_tower.onnx")
    assert (bundle.query_model, loaded.label_model) == (bundle.query_tower, None)


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_is_level_over_swaps(tmp_path: Path) -> None:
    releases = synthetic_release(tmp_path, labels=10_000, dim=16, spec="flat")
    ran = subprocess.run([sys.executable, "-c", SWAPS, releases], capture_output=True, text=True, check=True)
    after_6, after_20 = (int(line) * 1024 for line in ran.stdout.split())
    assert after_20 - after_6 <= 12e6, (after_6, after_20)
