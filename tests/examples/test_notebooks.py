"""The notebooks run from first to last cell, warnings as errors, and show what their own cells made."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.examples.execute import EXAMPLES, execute, hash_of_cells

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
RECIPE = EXAMPLES.parent / "trainer" / "recipes" / "movielens-100k.toml"
STRICT = """
import warnings

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="ipykernel")  # of its own shutdown
warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)  # Keras variables predate NumPy 2
"""
USERS, ITEMS, RATINGS = 60, 150, 1_500


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """What `longtail-train data movielens-100k` writes, but for its size."""
    folder = tmp_path / "data" / "movielens-100k"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tables = {
        "interactions": {
            "user_id": 1 + np.arange(RATINGS) % USERS,
            "item_id": np.minimum(rng.geometric(0.03, RATINGS), ITEMS),
            "rating": rng.integers(1, 6, RATINGS),
            "timestamp": 874_000_000 + 12_400 * rng.permutation(RATINGS),  # from September 1997 to April 1998
        },
        "users": {
            "user_id": 1 + np.arange(USERS),
            "age": rng.integers(18, 80, USERS),
            "gender": rng.choice(["F", "M"], USERS),
            "occupation": rng.choice(["artist", "writer"], USERS),
        },
        "items": {
            "item_id": 1 + np.arange(ITEMS),
            "title": [f"Film {item} (1995)" for item in range(1, 1 + ITEMS)],
            "genres": rng.choice(["Comedy", "Drama|War", ""], ITEMS),
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    shutil.copyfile(RECIPE, folder / "recipe.toml")
    return folder.parent


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, data: Path, tmp_path: Path) -> None:
    notebook = read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(STRICT))
    execute(notebook, tmp_path, LONGTAIL_QUICK="1", LONGTAIL_DATA=str(data))
    assert {path.name for path in tmp_path.iterdir()} <= {"data", ".jupyter"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_match_the_cells_and_name_no_machine(path: Path) -> None:
    notebook = read(path)
    message = f"the cells of {path.name} have changed since it ran; run `python -m tests.examples.execute {path.stem}`"
    assert notebook.metadata["longtail"]["outputs_of"] == hash_of_cells(notebook), message
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"/(home|root|tmp|Users|var|work)/", path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 300_000


def test_the_site_shows_a_notebook_with_its_outputs() -> None:
    expand = runpy.run_path(str(EXAMPLES.parent / "docs/_ext/pages.py"))["expand"]
    page = expand("<!-- page: examples/movielens.ipynb -->", "films")
    outputs = [output for cell in read(EXAMPLES / "movielens.ipynb").cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(re.findall(r"!\[[^\]]{20,}\]\(data:image/png;base64,[\w+/=]+\)", page)) == len(pictures) >= 5
    tables = [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]
    assert all(table in page for table in tables)
    assert "](audit.md)" in page  # as a page of docs/ needs it; in examples/ it is ../docs/audit.md


def test_every_example_is_listed() -> None:
    listed = re.findall(r"(?m)^- \[(.+?)\]\(\1\): .+", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(
        path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")
    )
