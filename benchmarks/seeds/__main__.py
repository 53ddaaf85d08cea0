"""Run the studies of the papers and print their findings and tables.

    for name in delicious amazon-beauty movielens-1m; do longtail-train data $name --out data/$name; done
    python -m benchmarks.seeds --data data

Measured records are in benchmarks/seeds/measured and are not run again; an interrupted command resumes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def main(
    data: Annotated[Path, typer.Option(help="Folder of prepared data sets; derived ones are written there.")] = Path(
        "data"
    ),
    out: Annotated[Path, typer.Option(help="Folder that keeps every run's figures.")] = Path("runs/seeds"),
    only: Annotated[list[str] | None, typer.Option(help="Only studies whose name begins so, such as r21.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few thousand pairs, one study a paper; printed.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only print findings and tables.")] = False,
) -> None:
    """Reproduce the papers' findings."""
    from benchmarks.seeds.store import Store
    from benchmarks.seeds.studies import studies

    root = Path(__file__).parent
    store = Store(out / "quick", out / "quick" / "packed") if quick else Store(out, root / "measured")
    all_studies = studies(quick=quick)
    chosen = [study for study in all_studies if study.name.startswith(tuple(only or [""]))]
    if not report:
        from benchmarks.seeds.data import derive
        from benchmarks.seeds.run import Bench

        console = Console(highlight=False)
        for study in chosen:
            derive(data, study.data)
            if not (data / study.data).exists():
                console.print(f"{study.name}: no {data / study.data}, not run.")
                continue
            bench = Bench(study, data, store, out / "work" / study.name, console)
            for method in study.methods:
                bench.finish(method)
    from benchmarks.seeds.findings import values_read
    from benchmarks.seeds.report import write

    if not quick:
        for study in chosen:
            store.pack(study, values_read(study, list(store.records(study).values())))
    write(all_studies, store)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    typer.run(main)
