"""Run a page as a reader types it: its shell and Python blocks, and the files that it says to write, in order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(?ms)^( *)```(\w+)\n(.*?)^ *```$")
_NAMED = re.compile(r"(write|save it as|add to)\s+`([\w./]+)`", re.IGNORECASE)
_SERVE = re.compile(r"(?m)^((?:\w+=\S+ (?:\\\n *)?)*longtail-serve run [^\n&#]*)&?[^\n]*$")
# A service is ready before the next line is typed, and ends with the shell or before another starts.
_PRELUDE = """\
set -e
trap 'status=$?; kill $service 2>/dev/null || true; wait; exit $status' EXIT
export LONGTAIL_PORT={port} LONGTAIL_DRAIN_SECONDS=0
stop() {{ if [ "$service" ]; then kill $service; wait $service || true; fi; }}
curl() {{ command curl --fail-with-body --retry 3 --retry-all-errors "$@"; }}
ready() {{ until command curl -sf localhost:{port}/readyz >/dev/null; do kill -0 $service; sleep 0.2; done; }}
"""


def blocks(language: str, text: str) -> list[str]:
    """Return the blocks of one language, without their indent."""
    return [re.sub(rf"(?m)^{indent}", "", body) for indent, name, body in _BLOCK.findall(text) if name == language]


def typed_lines(language: str, body: str) -> str:
    """Return what a reader types of a block: all, or the lines after `$`."""
    if language in ("console", "text"):
        return "".join(re.findall(r"(?m)^\$ ((?:.*\\\n)*.*\n)", body))
    return body if language in ("sh", "bash") else ""


def section(text: str, heading: str) -> str:
    """Return the text under a heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def script(text: str, port: int, *, written: bool = True) -> str:
    """Write one script of a page's commands, and of its files if `written`."""
    lines = [_PRELUDE.format(port=port)]
    for block in _BLOCK.finditer(text):
        indent, language, body = block.groups()
        body = re.sub(rf"(?m)^{indent}", "", body)
        named = _NAMED.search(text[: block.start()].rstrip().rpartition("\n\n")[2])
        if language in ("toml", "python") and named:
            if written:
                arrow = ">>" if named[1].lower() == "add to" else ">"
                lines.append(f"cat {arrow} {named[2]} <<'END_OF_FILE'\n{body}END_OF_FILE\n")
        elif language == "python":
            lines.append(f"python - <<'END_OF_FILE'\n{body}END_OF_FILE\n")
        else:
            lines.append(_SERVE.sub(r"stop\n\1&\nservice=$!\nready", typed_lines(language, body)))
    return "".join(lines).replace("8000", str(port))


def clone(folder: Path, *, environment: Path | None = Path(sys.prefix)) -> Path:
    """A clone of this working tree as a reader has it, with `.venv` where one is named, and no data of its own."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in tracked.stdout.decode().split("\0"):
        if name and ((ROOT / name).is_file() or (ROOT / name).is_symlink()):  # a link to each room
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    if environment is not None:
        (folder / ".venv").symlink_to(environment)
    return folder


def typed(text: str, folder: Path) -> str:
    """Run a script in a shell without this process's environments on its path; what it printed."""
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=os.environ | {"PATH": os.defpath}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-4_000:]}"
    return done.stdout
