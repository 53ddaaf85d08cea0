"""List the package's functions that answer a request, build a release or load it.

    python -m benchmarks.query_way [RELEASES]

The module serves RELEASES, or a release of 2,000 synthetic labels, with uvicorn in a thread of this process. After a
warm-up it lists the functions that each of ten POST /v1/retrieve calls in the threads that read, search and answer,
with their files and numbers of calls. Then it loads the synthetic release in this thread. Comprehensions, generator
expressions and lambdas count as part of the function around them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, Any
from urllib.request import Request, urlopen

import typer
import uvicorn

import longtail.serving
from longtail.index import build, open_releases
from longtail.serving import Settings, create_app
from longtail.serving.core.loader import load_release
from tests.bundles import make_bundle
from tests.serving.process import free_port

_ROOT = Path(longtail.__file__).parent
_ROOMS = ("bundle", "index", "serving", "state")
_WARM, _ROUNDS = 50, 10


@contextmanager
def served(releases: Path, state: Path) -> Iterator[str]:
    """Run the service in a thread; yield its address once it is ready."""
    port = free_port()
    app = create_app(Settings(releases=releases, state=state))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run, name="serve")
    thread.start()
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with suppress(OSError):
                urlopen(f"{url}/readyz").read()
                break
            time.sleep(0.05)
        yield url
    finally:
        server.should_exit = True
        thread.join()


def _name_function(frame: FrameType) -> tuple[str, str] | None:
    """Get file and name of a function of the rooms on the way; None for others."""
    code = frame.f_code
    if code.co_name[0] == "<" or not code.co_filename.startswith(str(_ROOT)):
        return None
    file = Path(code.co_filename).relative_to(_ROOT)
    return (str(file), code.co_qualname.replace("<locals>.", "")) if file.parts[0] in _ROOMS else None


def calls_of_a_load() -> Counter[tuple[str, str]]:
    """Count the calls that load a synthetic release, by file and function."""
    calls = Counter[tuple[str, str]]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := _name_function(frame)) is not None:
            calls[name] += 1

    with TemporaryDirectory() as scratch:
        make_bundle(labels=2_000).write(Path(scratch, "bundle"))
        name, releases = build(Path(scratch, "bundle"), Path(scratch, "releases")).name, Path(scratch, "releases")
        load_release(open_releases(releases), name)  # a first load imports modules and fills caches of the process
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            load_release(open_releases(releases), name)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return calls


def calls_of_a_query(releases: Path | None = None) -> Counter[tuple[str, str]]:
    """Count the calls that each of ten queries makes, by file and function; None: a synthetic release."""
    rounds: list[Counter[tuple[str, str]]] = []
    counting = False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        serves = threading.current_thread().name.startswith(("serve", "search"))
        if counting and serves and event == "call" and (name := _name_function(frame)) is not None:
            rounds[-1][name] += 1

    threading.setprofile(profile)
    try:
        with TemporaryDirectory() as scratch:
            if releases is None:
                releases = Path(scratch, "releases")
                make_bundle(labels=2_000).write(Path(scratch, "bundle"))
                open_releases(releases).publish(build(Path(scratch, "bundle"), releases).name)
            with served(releases, Path(scratch, "state")) as url:
                features = json.load(urlopen(f"{url}/v1/release"))["example"]
                body = json.dumps({"queries": [{"features": features, "k": 10}]}).encode()
                request = Request(f"{url}/v1/retrieve", body, {"Content-Type": "application/json"})
                for _ in range(_WARM):
                    urlopen(request).read()
                for _ in range(_ROUNDS):
                    rounds.append(Counter())
                    counting = True
                    urlopen(request).read()
                    time.sleep(0.02)  # Work after the answer is part of the way too.
                    counting = False
    finally:
        threading.setprofile(None)
    calls = rounds[0]
    for others in rounds[1:]:
        calls &= others
    return calls


def main(releases: Annotated[Path | None, typer.Argument()] = None) -> None:
    """Print the functions, then the numbers of functions, files and calls."""
    for way, calls in (("query", calls_of_a_query(releases)), ("load", calls_of_a_load())):
        for (file, name), count in sorted(calls.items()):
            print(f"{count:5}  {file:40} {name}")
        print(f"{way}: {len(calls)} functions in {len({file for file, _ in calls})} files, {calls.total()} calls")


if __name__ == "__main__":
    typer.run(main)
