"""Run the studies and write their tables, findings and plots into benchmarks/RESULTS.md.

    for name in delicious amazon-beauty gowalla movielens-1m; do longtail-train data $name --out data/$name; done
    python -m benchmarks.seeds --data data

Measured records are in benchmarks/seeds/measured and are not run again; an interrupted command resumes. Two processes
share the work with `--shard 0/2` and `--shard 1/2`; `--minutes` ends a process between two runs.
"""

from __future__ import annotations

import logging
import os
import time
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
    method: Annotated[list[str] | None, typer.Option(help="Only these rows, by their names.")] = None,
    shard: Annotated[str, typer.Option(help="Which part of the methods: I/N.")] = "0/1",
    minutes: Annotated[float, typer.Option(help="Begin no run after so long.")] = 600.0,
    quick: Annotated[bool, typer.Option("--quick", help="A few thousand pairs, one study a paper; printed.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Only write tables, findings and plots.")] = False,
) -> None:
    """Reproduce the papers' findings."""
    from benchmarks.seeds.store import Store, protocol_of
    from benchmarks.seeds.studies import studies

    root = Path(__file__).parent
    store = Store(out / "quick", out / "quick" / "packed") if quick else Store(out, root / "measured")
    known = studies(quick=quick)
    chosen = [study for study in known if study.name.startswith(tuple(only or [""]))]
    part, parts = map(int, shard.split("/"))
    if not report:
        from benchmarks.seeds.data import derive
        from benchmarks.seeds.run import Bench, OutOfTimeError
        from benchmarks.seeds.signal import overlaps

        console, deadline = Console(highlight=False), time.monotonic() + 60 * minutes
        for study in chosen:
            derive(data, study.data)
            if not (data / study.data).exists():
                console.print(f"{study.name}: no {data / study.data}, not run.")
                continue
            trees = out / "trees" / f"{study.name}-{protocol_of(study, study.methods[1])}"
            bench = Bench(study, data, store, trees, deadline, console)
            try:
                rows = [row for row in study.methods if row.name in (method or [row.name])]
                for row in rows[part::parts]:
                    bench.finish(row)
                if study.name == "bm20.mixture-10k" and part == 0 and not store.overlaps():
                    store.put_overlaps(overlaps(bench))
            except OutOfTimeError:
                console.print(f"{study.name}: out of time; the same command goes on.")
                raise typer.Exit(75) from None
    if parts == 1:
        from benchmarks.seeds.findings import values_read
        from benchmarks.seeds.report import write

        if not quick:
            for study in chosen:
                store.pack(study, values_read(study, list(store.records(study).values())))
        write(known, store, root.parent, printed=quick)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    typer.run(main)
