"""The recipe that `longtail-train init` writes, against what other libraries give, on generated shops and real logs.

    python -m benchmarks.shops --out runs/shops
    python -m benchmarks.shops --out runs/shops --law drift --seed 7 --users 20000 --products 20000 --events 600000

Nothing is chosen per shop: `init` looks at the files, `fit` trains what it wrote and measures the baselines on the same
split (iALS and item-kNN tuned on validation). Prints a Markdown table.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.shops.generate import LAWS, Law, write
from longtail.bundle import Bundle

_TRAIN = Path(sys.executable).parent / "longtail-train"
_METRICS = ("recall@20", "ndcg@20", "recall@20/head", "recall@20/torso", "recall@20/tail", "recall@20/new")


def main(
    out: Annotated[Path, typer.Option(help="Where shops and runs are kept; what is there is not made again.")],
    law: Annotated[list[str] | None, typer.Option(help="Only these: static, sessions, drift, fresh.")] = None,
    users: int = 6_000,
    products: int = 5_000,
    events: int = 150_000,
    seed: int = 0,
) -> None:
    """Print the table; baselines are tuned on validation."""
    print(f"| shop | method | {' | '.join(_METRICS)} |")
    print("| --- " * (len(_METRICS) + 2) + "|")
    for name in LAWS:
        if name in (law or LAWS):
            for row in _shop(out, name, users=users, products=products, events=events, seed=seed):
                print(f"| {' | '.join([name, *row])} |", flush=True)


def _shop(out: Path, law: Law, *, users: int, products: int, events: int, seed: int) -> list[list[str]]:
    """Rows of one shop: ours at the chosen dial, then the baselines."""
    data, run = out / f"{law}-{events}-{seed}", out / f"run-{law}-{events}-{seed}"
    if not data.exists():
        write(data, law, products=products, users=users, events=events, seed=seed)
    recipe = data / "recipe.toml"
    if not recipe.exists():
        tables = ["--labels", data / "products.parquet", "--queries", data / "users.parquet"]
        _run("init", data / "events.parquet", *tables, "--out", recipe)
    if not run.exists():
        _run("fit", recipe, "--out", run, "--set", "evaluation.tune_baselines=true")
    manifest = Bundle.load(run).manifest
    dial, prior = manifest.bias_removal, manifest.popularity
    ours = next(at for at in dial.curve if (at.bias_removal, at.popularity) == (dial.default, prior.default))
    baselines: dict[str, Any] = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["baselines"]
    rows = {f"Longtail, λ = {dial.default:g}, μ = {prior.default:g}": ours.model_dump()["metrics"]} | baselines
    return [[name, *(f"{metrics[key]['value']:.4f}" for key in _METRICS)] for name, metrics in rows.items()]


def _run(*words: object) -> None:
    subprocess.run([str(_TRAIN), *map(str, words)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    typer.run(main)
