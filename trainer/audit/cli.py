"""`longtail-audit`: measure lists of any recommender, and keep a promise with an exit code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longtail.commands.app import App, VersionOption

app = App()


@dataclass(frozen=True)
class AuditOptions:
    """Columns of the tables, and what is measured."""

    valid: Annotated[
        list[str] | None,
        typer.Option("--valid", help="Interactions between the two: queries are known by them, labels not counted."),
    ] = None
    query_id: Annotated[str, typer.Option("--query-id", help="Column of query ids, in every table.")] = "user_id"
    label_id: Annotated[
        str, typer.Option("--label-id", help="Column of label ids, in every table; lists may have `labels` instead.")
    ] = "item_id"
    timestamp: Annotated[str | None, typer.Option("--timestamp", help="Column of the interactions' times.")] = None
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="List length; the first is shown (default: 20).")
    ] = None
    queries: Annotated[list[str] | None, typer.Option("--queries", help="Table of queries, for --group.")] = None
    labels: Annotated[list[str] | None, typer.Option("--labels", help="Table of all labels of the catalogue.")] = None
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Column of --queries to group by, such as country.")
    ] = None
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            help="popularity, recent popularity, item-kNN, RP3beta, EASE, Turbo-CF, iALS, or none "
            "(default: popularity, item-kNN).",
        ),
    ] = None
    buckets: Annotated[
        str, typer.Option("--buckets", help="quantile: terciles of label counts; count: from 100 and 20 pairs.")
    ] = "quantile"
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Labels of a query's history may be listed and found.")
    ] = False


@app.command(epilog="Example: longtail-audit lists.csv --train old.csv --test new.csv --out audit")
def run(
    lists: Annotated[
        str,
        typer.Argument(
            metavar="LISTS",
            help="Table of lists: a row for each query and label, ordered by a column `rank` or `score`, or a list "
            "of labels for each query. Parquet, CSV, TSV or JSON lines, a directory, a glob, a URL, or a query.",
        ),
    ],
    train: Annotated[
        list[str],
        typer.Option("--train", help="Interactions that a model was trained on: they make the buckets."),
    ],
    test: Annotated[list[str], typer.Option("--test", help="Interactions that the lists should find.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of report.html and metrics.json; must not exist.")],
    options: AuditOptions,
    promise: Annotated[
        Path | None, typer.Option("--promise", help="TOML of least and most values; exit code 1 if one is broken.")
    ] = None,
    version: VersionOption = False,  # noqa: ARG001 (its callback prints it)
) -> None:
    """Measure lists of any recommender, compared with baselines. Figures come by bucket and group.

    Exit code 0, 1 where a promise is broken, 2 where something cannot be read or judged.
    """
    from longtail.bundle.store import refuse_existing
    from longtail.tables import as_source
    from longtail.trainer.audit.measure import AuditInputs, audit
    from longtail.trainer.audit.promise import judge, read_promise
    from longtail.trainer.audit.report import show, write

    refuse_existing(out)
    promised = None if promise is None else read_promise(promise)
    names = ["popularity", "item-kNN"] if options.baseline is None else options.baseline
    figures = audit(
        AuditInputs(
            as_source(lists), train, test,
            query_id=options.query_id, label_id=options.label_id, timestamp=options.timestamp,
            ks=tuple(options.k or [20]), queries=options.queries, labels=options.labels,
            groups=tuple(options.group or ()), valid=options.valid, buckets=options.buckets,
            baselines=tuple(name for name in names if name != "none"), include_seen=options.include_seen,
        )
    )  # fmt: skip
    verdicts = [] if promised is None else judge(promised, figures)
    show(figures, verdicts, Console())
    write(figures, verdicts, out)
    raise typer.Exit(0 if all(verdict.is_kept for verdict in verdicts) else 1)


def main() -> None:
    """Run the command.

    A TrainerError, DataError, BundleError or OSError is one line on stderr and exit code 2.
    """
    from longtail.bundle import BundleError
    from longtail.trainer.errors import DataError, TrainerError

    try:
        app()
    except (TrainerError, DataError, BundleError, OSError) as error:
        print(f"longtail-audit: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
