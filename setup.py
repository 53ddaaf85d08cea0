"""The folders of the house become the packages `longtail.<room>`; pyproject.toml has everything else.

A room that is not there, as in an image that copies only what it runs, is left out together with its commands.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOMS = ("bundle", "client", "commands", "index", "serving", "state", "tables", "trainer")
COMMANDS = {
    "commands": {"longtail": "main"},
    "trainer": {"longtail-train": "trainer", "longtail-audit": "audit"},
    "index": {"longtail-index": "index"},
    "serving": {"longtail-serve": "serving"},
}

present = [room for room in ROOMS if Path(room, "__init__.py").exists()]
setup(
    package_dir={f"longtail.{room}": room for room in present},
    packages=[
        f"longtail.{package}" for room in present for package in (room, *(f"{room}.{p}" for p in find_packages(room)))
    ],
    entry_points={
        "console_scripts": [
            f"{command} = longtail.commands:{function}"
            for room in present
            for command, function in COMMANDS.get(room, {}).items()
        ]
    },
)
