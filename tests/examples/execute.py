"""Run the notebooks of `examples/` and keep what they show: `python -m tests.examples.execute [NAME …]`.

A notebook's outputs are committed, for those who read it without running it. Its metadata has the hash of the cells
that made them, so that a test finds outputs of other cells.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SECONDS = 900
"""Longest that one cell may take."""


def execute(notebook: Any, folder: Path, **environment: str) -> None:
    """Run every cell in a fresh kernel of this interpreter, in `folder`; outputs go into `notebook`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; names it and its traceback.
    """
    private = {name: str(folder / ".jupyter") for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, **private, **environment})


def hash_of_cells(notebook: Any) -> str:
    """sha256 of the code but for its imports, which may move without changing what is shown; hex."""
    code = [line for cell in notebook.cells if cell.cell_type == "code" for line in cell.source.splitlines()]
    lines = [line for line in code if not line.startswith(("import ", "from "))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def shrink_picture(png: str) -> str:
    """Give a picture, PNG in base 64, a palette of 128 colours, a third of its bytes."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main(names: list[str]) -> None:
    """Run notebooks, all or the named, in full, and write them back."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = nbformat.read(path, as_version=4)
        with TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        for cell in notebook.cells:
            if cell.cell_type == "code":  # without what libraries warn of, such as a missing progress bar
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
                for output in cell.outputs:
                    if "image/png" in output.get("data", {}):
                        output.data["image/png"] = shrink_picture(output.data["image/png"])
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "longtail": {"outputs_of": hash_of_cells(notebook)},
        }
        nbformat.write(notebook, path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
