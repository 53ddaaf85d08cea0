"""The commands of the rooms that are there; pyproject.toml has everything else.

An image copies only the rooms that it runs: a link to a room that is not there is no package and brings no command.
"""

from pathlib import Path

from setuptools import setup

COMMANDS = {
    "commands": {"longtail": "main"},
    "trainer": {"longtail-train": "trainer", "longtail-audit": "audit"},
    "index": {"longtail-index": "index"},
    "serving": {"longtail-serve": "serving"},
}

setup(
    entry_points={
        "console_scripts": [
            f"{command} = longtail.commands:{function}"
            for room, functions in COMMANDS.items()
            if Path("longtail", room, "__init__.py").exists()
            for command, function in functions.items()
        ]
    }
)
