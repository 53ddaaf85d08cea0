"""Define the console commands `longtail-train`, `longtail-audit`, `longtail-index` and `longtail-serve`.

They are outside the rooms, because they must run where a room cannot be imported, to say which extra is missing.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from importlib.metadata import version

__all__ = ["audit", "index", "serving", "trainer"]

# Modules that come with another extra than the command's own.
_OTHERS = {"faiss": "index", "jax": "jax"}


def trainer() -> None:
    """Run `longtail-train`; exits with 2 and one line if the extra `train` is not installed."""
    _run("longtail-train", "trainer", extra="train")


def audit() -> None:
    """Run `longtail-audit`; exits with 2 and one line if the extra `audit` is not installed."""
    _run("longtail-audit", "trainer.audit", extra="audit")


def index() -> None:
    """Run `longtail-index`; exits with 2 and one line if neither the extra `index` nor `gpu` is installed."""
    _run("longtail-index", "index", extra="index")


def serving() -> None:
    """Run `longtail-serve`; exits with 2 and one line without the extras `serve`, and `index` or `gpu`."""
    _run("longtail-serve", "serving", extra="serve")


def _run(command: str, package: str, *, extra: str) -> None:
    _write_any_text()
    if sys.argv[1:] == ["--version"]:
        print(f"{command} {version('longtail')}")
        sys.exit()
    try:
        import_module(f"longtail.{package}.cli").main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "longtail"):
            raise
        needed = _OTHERS.get(missing, extra)
        print(
            f"{command}: expected the extra {needed!r}, found no module {missing!r}: pip install 'longtail[{needed}]'",
            file=sys.stderr,
        )
        sys.exit(2)


def _write_any_text() -> None:
    """Write `?` for characters that the terminal lacks, in child processes too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:replace"
