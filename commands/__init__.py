"""Define the console commands `longtail-train`, `longtail-audit`, `longtail-index`, `longtail-serve`, and `longtail`.

They are outside the rooms, because they must run where a room cannot be imported, to say which extra is missing.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module

from longtail import __version__
from longtail.extras import importing, pip_install

__all__ = ["audit", "index", "main", "serving", "trainer"]

_OVERVIEW = """\
Usage: longtail COMMAND …, the same as longtail-COMMAND …

  train  Draft a recipe from a log, check the data, train, evaluate and tune.
  audit  Judge the lists of any recommender.
  index  Build, publish and roll back releases.
  serve  Run the service, answer queries in bulk, export feedback.

longtail COMMAND --help lists options, longtail --version the version.
"""

# Modules that come with another extra than the command's own.
_OTHERS = {"faiss": "index", "jax": "jax"}


def trainer() -> None:
    """Run `longtail-train`. If the extra `train` is missing, say so and exit with code 2."""
    _run("longtail-train", "trainer", extra="train")


def audit() -> None:
    """Run `longtail-audit`. If the extra `audit` is missing, say so and exit with code 2."""
    _run("longtail-audit", "trainer.audit", extra="audit")


def index() -> None:
    """Run `longtail-index`. If the extras `index` and `gpu` are both missing, say so and exit with code 2."""
    _run("longtail-index", "index", extra="index")


def serving() -> None:
    """Run `longtail-serve`. If a necessary extra is missing, say so and exit with code 2."""
    _run("longtail-serve", "serving", extra="serve")


_COMMANDS = {"train": trainer, "audit": audit, "index": index, "serve": serving}


def main() -> None:
    """Run `longtail`, whose first word names one of the other commands."""
    _write_any_text()
    name, *words = sys.argv[1:] or ["--help"]
    if name == "--version":
        print(f"longtail {__version__}")
    elif name in ("-h", "--help"):
        print(_OVERVIEW, end="")
    elif name in _COMMANDS:
        sys.argv = [f"longtail-{name}", *words]
        _COMMANDS[name]()
    else:
        print(f"longtail: expected a command, one of {', '.join(_COMMANDS)}, received {name!r}", file=sys.stderr)
        sys.exit(2)


def _run(command: str, package: str, *, extra: str) -> None:
    _write_any_text()
    if sys.argv[1:] == ["--version"]:
        print(f"{command} {__version__}")
        sys.exit()
    try:
        with importing():
            room = import_module(f"longtail.{package}.cli")
        room.main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("", "longtail"):
            raise
        needed = _OTHERS.get(missing, extra)
        print(
            f"{command}: expected the extra {needed!r}, found no module {missing!r}: {pip_install(needed)}",
            file=sys.stderr,
        )
        sys.exit(2)


def _write_any_text() -> None:
    """Write `?` for characters that the terminal lacks, in child processes too."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            os.environ["PYTHONIOENCODING"] = f"{stream.encoding}:replace"
