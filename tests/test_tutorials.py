"""The tutorials, as a reader types them in a clone: each command, request and program, in order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pages import ROOT, blocks, clone, script, typed
from tests.serving.process import free_port

pytestmark = pytest.mark.process

ENGINEER, RESEARCHER, OPERATOR = (
    (ROOT / "docs" / f"tutorial_{who}.md").read_text() for who in ("engineer", "researcher", "operator")
)
ACTIVATE = "```sh\nsource .venv/bin/activate\n```\n\n"
FEW = "--set training.epochs=4 --set model.temperature=0.3 --set 'evaluation.baselines=[\"popularity\"]'"


def quick(text: str) -> str:
    """The same commands, but for the length of the trainings."""
    towers_alone = "sed -i '/^.cooccurrence.$/d' shop/recipe.toml\n"  # a term that comes and goes would be refused
    text = re.sub(r"(?m)^longtail-train init .*$", rf"\g<0>\n{towers_alone}", text)
    return re.sub(r"(?m)^longtail-train fit .*$", rf"\g<0> {FEW}", text)


@pytest.mark.nightly
@pytest.mark.parametrize("complete", [False, True], ids=["quick", "complete"])
def test_from_a_log_to_a_service(complete: bool, tmp_path: Path) -> None:
    text = script(ENGINEER, free_port())
    output = typed(text if complete else quick(text), clone(tmp_path))
    (expected,) = [block for block in blocks("text", ENGINEER) if "shop/recipe.toml" in block]
    assert expected in output, "what init says"
    (buckets,) = [block for block in blocks("text", ENGINEER) if "training pairs" in block]
    for line in buckets.splitlines():
        assert line in output or line == "…", "what check says"
    assert '"bucket":"' in output
    assert len(re.findall(r"\bp\d+ (?:head|torso|tail|new) ", output)) == 3, "the client in Python"
    assert "0 labels chosen" in output, "feedback of the last minute is for the next export"
    assert len(re.findall(r"(?m)^published: ", output)) == 2


@pytest.mark.nightly
def test_operating_a_service(tmp_path: Path) -> None:
    """Sections 1 to 3, on a directory with two releases; sections 5 and 6 need containers."""
    releases = f"""
```sh
cp -r examples/shop shop
longtail-train init shop/clicks.parquet --labels shop/products.parquet --out shop/recipe.toml
longtail-train fit shop/recipe.toml --out runs/1 {FEW}
longtail-index build runs/1 --releases releases/shop --publish
sleep 1.1  # releases are named by the second
longtail-index build runs/1 --releases releases/shop
```

"""
    parts = [part for part in OPERATOR.split("\n## ") if part[:2] in ("1.", "2.", "3.")]
    assert len(parts) == 3
    output = typed(script(ACTIVATE + releases + "\n## ".join(parts), free_port()), clone(tmp_path))
    assert '"severity"' in output
    assert re.search(r"(?m)^published: ", output)
    assert (tmp_path / "releases/shop/promise.toml").read_text() == blocks("toml", OPERATOR)[0]


def test_a_custom_loss_runs(tmp_path: Path) -> None:
    """Sections 1 and 2, which train nothing."""
    parts = [part for part in RESEARCHER.split("\n## ") if part[:2] in ("1.", "2.")]
    typed(script(ACTIVATE + "\n## ".join(parts), free_port()), clone(tmp_path))


@pytest.mark.nightly
def test_a_custom_loss_is_measured(tmp_path: Path) -> None:
    """The whole page, on a small log in place of Amazon Beauty's."""
    folder, rng = clone(tmp_path) / "data" / "amazon-beauty", np.random.default_rng(0)
    folder.mkdir(parents=True)
    columns = {"user_id": rng.integers(60, size=3_000), "item_id": np.minimum(rng.geometric(0.03, 3_000), 150)}
    pq.write_table(pa.table(columns), folder / "interactions.parquet")
    output = typed(script(ACTIVATE + RESEARCHER, free_port()), tmp_path)
    printed = next(block for block in blocks("text", RESEARCHER) if "lead" in block)
    heads = [re.split(r" +softmax", line)[0] for line in printed.splitlines()]
    assert [re.split(r" +softmax", line)[0] for line in output.splitlines() if " lead " in line] == heads
