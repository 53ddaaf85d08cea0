"""Make the README's pictures from the demo: recall, exposure and coverage over λ, and the dashboard.

    python -m docs.pictures [--chromium PATH]

`make demo ONESHOT=1` comes first. The dashboard is a screenshot of a service that answers for four minutes: most
requests at the default λ, one in twenty at λ = ½.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import pyarrow.parquet as pq
import typer

from longtail.bundle import Bundle
from longtail.client import Client, Feedback
from longtail.trainer import plot_dial
from tests.serving.process import server

IMAGES = Path(__file__).parent / "images"
DATA, RUN, RELEASES = Path("data/movielens-100k"), Path("runs/demo"), Path("releases/demo")
_SECONDS, _PAUSE = 240, 0.02


def main(chromium: Annotated[str, typer.Option(help="Browser for the screenshot.")] = "chromium") -> None:
    """Write docs/images/dial.png and docs/images/dashboard.png."""
    if not RUN.exists():
        raise typer.BadParameter(f"{RUN} does not exist; run make demo ONESHOT=1 first")
    if shutil.which(chromium) is None:
        raise typer.BadParameter(f"{chromium} is not installed; name a browser based on Chromium with --chromium")
    bundle = Bundle.load(RUN)
    plot_dial(bundle).savefig(IMAGES / "dial.png")
    print(IMAGES / "dial.png")
    with TemporaryDirectory() as state, server(RELEASES, Path(state, "log"), state=state) as service:
        service.wait_until_ready()
        _use(service.url)
        _screenshot(chromium, f"{service.url}/dashboard", IMAGES / "dashboard.png")
    print(IMAGES / "dashboard.png")


def _use(url: str) -> None:
    """Ask for users of the demo before their last film, and report that film as chosen."""
    rng, ends = random.Random(0), time.monotonic() + _SECONDS
    pairs = (
        pq.read_table(DATA / "interactions.parquet")
        .sort_by("timestamp")
        .group_by("user_id")
        .aggregate([("item_id", "list")])
    )
    users = list(zip(pairs["user_id"].to_pylist(), pairs["item_id_list"].to_pylist(), strict=True))
    rng.shuffle(users)
    with Client(url) as client:
        for user, history in cycle(users):
            dial = {"bias_removal": 0.5} if rng.random() < 0.05 else {}
            *history_before, next_film = history
            features = {"user_id": user, "history": history_before[-50:]}
            (result,) = client.retrieve(features=features, k=20, exclude=history_before, **dial).results
            client.feedback(Feedback(result.answer_id, [next_film]))
            if time.monotonic() > ends:
                return
            time.sleep(_PAUSE)


def _screenshot(chromium: str, url: str, out: Path) -> None:
    options = [
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        "--window-size=1280,1180",
        "--virtual-time-budget=5000",
    ]
    subprocess.run([chromium, *options, f"--screenshot={out}", url], check=True, capture_output=True, timeout=60)


if __name__ == "__main__":
    typer.run(main)
