"""`longtail-audit`: measure lists of any recommender, and keep a promise with an exit code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longtail.commands.app import App, VersionOption, split_settings

app = App()

_KEYS = ("data.query_id", "data.label_id", "data.timestamp", "evaluation.buckets", "evaluation.exclude_seen")


@dataclass(frozen=True)
class AuditOptions:
    """Hold tables, list lengths and baselines."""

    valid: Annotated[
        list[str] | None,
        typer.Option("--valid", help="Interactions between the two: queries are known by them, labels not counted."),
    ] = None
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
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="As in a recipe: data.query_id=user_id, data.label_id=item_id, data.timestamp=COLUMN, "
            "evaluation.buckets=quantile or count, evaluation.exclude_seen=true or false.",
        ),
    ] = None


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
    from longtail.trainer.errors import RecipeError

    refuse_existing(out)
    promised = None if promise is None else read_promise(promise)
    names = ["popularity", "item-kNN"] if options.baseline is None else options.baseline
    settings = split_settings(options.set_, RecipeError, _KEYS)
    if (exclude := settings.pop("evaluation.exclude_seen", "true")) not in ("true", "false"):
        raise RecipeError(f"--set evaluation.exclude_seen: expected true or false, received {exclude!r}")
    figures = audit(
        AuditInputs(
            as_source(lists), train, test,
            ks=tuple(options.k or [20]), queries=options.queries, labels=options.labels,
            groups=tuple(options.group or ()), valid=options.valid,
            baselines=tuple(name for name in names if name != "none"), exclude_seen=exclude != "false",
            **{key.partition(".")[2]: value for key, value in settings.items()},
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
