"""Run the studies and write their tables and plots into benchmarks/RESULTS.md.

    for name in delicious amazon-beauty gowalla; do longtail-train data $name --out data/$name; done
    python -m benchmarks.seeds --data data

Jobs that were measured are not run again, and a killed job goes on from its checkpoint: hours may be split. The
tables are written after every study from what is there.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepared data sets.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Folder that keeps every job's figures.")] = Path("runs/seeds"),
    study: Annotated[list[str] | None, typer.Option(help="Only these: r21, re19, a2, bm20, delicious.")] = None,
    on: Annotated[list[str] | None, typer.Option(help="Only these data sets.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the epochs, Delicious and Beauty only.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only write tables and plots.")] = False,
) -> None:
    """Reproduce the papers' findings."""
    from benchmarks.seeds.data import derive
    from benchmarks.seeds.run import run
    from benchmarks.seeds.studies import studies
    from benchmarks.seeds.tables import write

    console = Console()
    out = out / "quick" if quick else out
    jobs = studies(quick=quick)
    chosen = [job for job in jobs if job.study in (study or [job.study]) and job.data in (on or [job.data])]
    if not report:
        if any(job.data in ("synthetic-200k", "gowalla-history") for job in chosen):
            derive(data)
        for job in chosen:
            run(job, data, out, console)
    write(jobs, out, Path(__file__).parents[1], quick=quick)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    typer.run(main)
