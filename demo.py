"""The whole road on real data: download → train → index → publish → serve → query, by the commands you would type."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow import feather
from rich.console import Console
from rich.table import Column, Table

DATA, RUN, RELEASES = Path("data/movielens-100k"), Path("runs/demo"), Path("releases/demo")
JUST_WATCHED = ("Chasing Amy (1997)", "Clerks (1994)")
USER = "42"
DIAL = {0.0: "λ = 0, taste beyond popularity", 1.0: "λ = 1, popularity put back"}
BINARIES = Path(sys.executable).parent
NEXT = (
    "cp -r examples/shop shop",
    "longtail-train init shop/clicks.parquet --labels shop/products.parquet --queries shop/users.parquet "
    "--out shop/recipe.toml",
    "longtail-train fit shop/recipe.toml --out runs/shop",
)
"""The first commands of README's section on own logs."""
console = Console(highlight=False)


def main() -> None:
    """Run the demo; the service stays up until Ctrl-C, or stops at once with --oneshot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--oneshot", action="store_true", help="stop the service after the first query")
    options = parser.parse_args()
    begin = time.monotonic()
    # Ended by a signal's default action, this process would leave its service running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    refuse_taken_port(options.port)

    if not DATA.exists():
        run("longtail-train", "data", "movielens-100k", "--out", DATA)
    shutil.rmtree(RUN, ignore_errors=True)
    run("longtail-train", "fit", DATA / "recipe.toml", "--out", RUN)
    show_dial()
    run("longtail-index", "build", RUN, "--releases", RELEASES, "--publish")
    step("longtail-serve", "run", RELEASES, "--port", options.port)
    service = subprocess.Popen(
        [BINARIES / "longtail-serve", "run", RELEASES, "--port", str(options.port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{options.port}"
        wait_until_ready(url, service, published=json.loads((RELEASES / "CURRENT").read_bytes())["current"])
        show_queries(url)
        minutes, seconds = divmod(round(time.monotonic() - begin), 60)
        console.print(f"\n[bold green]Done in {minutes} min {seconds} s.[/] Open:")
        for link, what in (
            (f"{url}/dashboard", "what head, torso and tail get"),
            (f"{url}/docs", "the API"),
            (f"{url}/metrics", "Prometheus"),
            (f"{RUN}/report.html", "the λ curve"),
        ):
            console.print(f"  {link:34}{what}", highlight=False)
        console.print("\nNext, on a made-up shop, or on your own files in its place:")
        activate = os.path.relpath(Path(sys.prefix, "bin", "activate"))
        for line in (f"source {activate}", *NEXT):
            console.print(line, soft_wrap=True)
        if not options.oneshot:
            console.print("\nThe service keeps running; Ctrl-C stops it.")
            service.wait()
    except KeyboardInterrupt:
        pass
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(timeout=30)


def step(*command: object) -> list[str]:
    """Print a command as the reader would type it; returns its words."""
    words = [str(word) for word in command]
    console.print(f"\n[bold blue]$[/] [bold]{shlex.join(words)}[/]", soft_wrap=True)
    return words


def run(*command: object) -> None:
    """Run one of our commands; its failure ends the demo with its exit code."""
    name, *words = step(*command)
    code = subprocess.run([BINARIES / name, *words], check=False).returncode
    if code:
        sys.exit(code)


def refuse_taken_port(port: int) -> None:
    """End the demo before it trains if its service could not listen on the port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        sys.exit(
            f"expected a free port for the demo's service, found 127.0.0.1 port {port}: {reason}; "
            f"choose another: make demo PORT={another(port)}"
        )


def another(port: int) -> int:
    """Return a port to propose instead."""
    return port + 1 if port < 65_535 else 8000


def wait_until_ready(url: str, service: subprocess.Popen[bytes], *, published: str) -> None:
    """Wait until the demo's own service answers with the published release; ends the demo if it died."""
    while service.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
            with urllib.request.urlopen(f"{url}/v1/release", timeout=5) as answer:
                # If another service took the port during training, it answers until ours has ended.
                if json.load(answer)["name"] == published:
                    return
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError):
            pass
        time.sleep(0.1)
    port = int(url.rpartition(":")[2])
    sys.exit(
        f"expected longtail-serve to answer at {url}, found that it ended with exit code {service.returncode}: another "
        f"program may have taken the port meanwhile; choose another: make demo PORT={another(port)}"
    )


def show_dial() -> None:
    """Print what each bucket gets along the dials, from the bundle's own evaluation."""
    manifest = json.loads((RUN / "manifest.json").read_text(encoding="utf-8"))
    dial, term = manifest["bias_removal"], manifest["cooccurrence"]
    default = dial["default"], term["default"] if term else 0.0
    points = {(point["bias_removal"], point["cooccurrence"]): point["metrics"] for point in dial["curve"]}
    columns = ["λ", "ω", "recall@20", "torso", "tail", "slots of the tail", "films shown"]
    title = f"What each bucket gets ({dial['curve_split']})"
    table = Table(*(Column(name, justify="right") for name in columns), title=title)
    for setting, metrics in sorted(points.items(), key=lambda point: (point[0][1], point[0][0])):
        if setting != default and (setting[0] not in (0.0, 0.5, 1.0) or setting[1] not in (0.0, default[1])):
            continue
        values = [metrics[name]["value"] for name in ("recall@20", "recall@20/torso", "recall@20/tail")]
        shares = [metrics[name]["value"] for name in ("exposure@20/tail", "coverage@20")]
        mark = "▶ " if setting == default else ""
        cells = [f"{mark}{setting[0]:g}", f"{setting[1]:g}", *(f"{value:.3f}" for value in values)]
        table.add_row(*cells, *(f"{share:.0%}" for share in shares), style="bold" if setting == default else None)
    console.print()
    console.print(table)
    console.print(
        "One model, one index: every request turns λ between tail and head, and ω, the weight of what was chosen "
        "together. A request that names neither gets the line marked ▶."
    )


def show_queries(url: str) -> None:
    """Query for a known user and a visitor with two films, at two dial points."""
    labels = feather.read_table(RUN / "labels.arrow", columns=["label_id", "title"])
    id_of = dict(zip(labels["title"].to_pylist(), labels["label_id"].to_pylist(), strict=True))
    interactions = pq.read_table(DATA / "interactions.parquet", filters=[("user_id", "=", int(USER))])
    history = [str(item) for item in interactions.sort_by("timestamp")["item_id"].to_pylist()]
    query(
        url, f"User {USER}, who has rated {len(history)} films", {"user_id": USER, "history": history}, exclude=history
    )
    watched = [id_of[title] for title in JUST_WATCHED]
    query(url, f"Someone new who just watched {', '.join(JUST_WATCHED)}", {"history": watched}, exclude=watched)


def query(url: str, who: str, features: dict[str, Any], *, exclude: list[str]) -> None:
    """Print the answers to one request with the dial at two settings."""
    queries = [{"features": features, "k": 6, "exclude": exclude, "bias_removal": dial} for dial in DIAL]
    answer = post(f"{url}/v1/retrieve", {"queries": queries})
    console.print(f"\n[bold]{who}[/]")
    for setting, result in zip(DIAL.values(), answer["results"], strict=True):
        table = Table(Column(setting, width=52), Column("bucket", width=6), Column("score", width=6, justify="right"))
        for label in result["labels"]:
            table.add_row(label["display"]["title"], label["bucket"], f"{label['score']:.2f}")
        console.print(table)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST JSON, get JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        content: dict[str, Any] = json.load(answer)
    return content


if __name__ == "__main__":
    main()
