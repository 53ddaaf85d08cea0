"""`longtail-train`: prepare data, fit and tune recipes, evaluate and compare bundles, export checkpoints."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from longtail.commands.app import app_of_commands, say_next, split_settings
from longtail.extras import importing
from longtail.trainer.devices import WORLD, Cluster, check_installed, describe_lost_process
from longtail.trainer.errors import DataError, RecipeError, TrainerError

if TYPE_CHECKING:
    from longtail.trainer.config import Recipe

app = app_of_commands("Train two-tower retrieval models and write bundles.")

_Out = Annotated[Path, typer.Option("--out", help="Bundle directory to write; must not exist.")]
_RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a TOML file.")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one recipe value, KEY=VALUE, such as model.dim=32 or data.since=30d."),
]
_COLUMN_KEYS = ("data.query_id", "data.label_id", "data.timestamp", "data.event")
_WarmStart = Annotated[
    Path | None, typer.Option("--warm-start", help="Bundle to begin from: its rows and weights, where they fit.")
]


@app.command(epilog="Example: longtail-train data movielens-100k --out movielens")
def data(
    name: Annotated[
        str,
        typer.Argument(help="movielens-100k, movielens-1m, gowalla, gowalla-popularity, amazon-beauty or delicious."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not exist.")],
    source: Annotated[
        str | None, typer.Option("--from", help="Files to read: a directory, or a zip as a path or URL.")
    ] = None,
) -> None:
    """Prepare a known data set: Parquet files and a matching recipe."""
    from longtail.trainer.data.sources import prepare

    prepare(name, out, source, say=Console(stderr=True).print)
    typer.echo(out / "recipe.toml")
    say_next("longtail-train", "fit", out / "recipe.toml", "--out", f"runs/{name}")


@app.command(epilog="Example: longtail-train init clicks.parquet --labels products.parquet")
def init(
    clicks: Annotated[
        list[Path],
        typer.Argument(metavar="CLICKS", help="Interactions: Parquet, CSV or TSV files, directories or globs."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Recipe to write; must not exist.")] = Path("recipe.toml"),
    labels: Annotated[Path | None, typer.Option("--labels", help="Feature table of labels.")] = None,
    queries: Annotated[Path | None, typer.Option("--queries", help="Feature table of queries.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=COLUMN",
            help="Name a column of CLICKS: data.query_id=user, data.label_id, data.timestamp or data.event.",
        ),
    ] = None,
) -> None:
    """Draft a recipe from a log and its feature tables. Comments give a reason for every choice."""
    from longtail.trainer.init.recipe import draft_recipe

    columns = split_settings(
        set_, RecipeError, _COLUMN_KEYS, metavar="KEY=COLUMN", hint="; edit the recipe for other keys"
    )
    columns = {key.removeprefix("data."): column for key, column in columns.items()}
    roles = draft_recipe(clicks, out, queries=queries, labels=labels, **columns)
    say = Console(stderr=True).print
    for line in roles.lines():
        say(line, highlight=False, markup=False)
    typer.echo(out)
    say_next("longtail-train", "fit", out, "--out", "runs/1")


@app.command(epilog="Example: longtail-train prepare recipe.toml")
def prepare(
    recipe: _RecipeFile,
    set_: _Set = None,
) -> None:
    """Read a recipe's data once into data.prepared. Later jobs map that folder. Run again to resume."""
    checked = _load_recipe(recipe, set_)  # before anything slow is loaded
    from longtail.trainer import check as checking
    from longtail.trainer.data import prepared

    dataset, folder = prepared.prepare(checked)
    report, console = checking.examine(checked, dataset), Console(stderr=True)
    checking.print_summary(report, lambda line: console.print(line, highlight=False, soft_wrap=True))
    typer.echo(folder)


@app.command(epilog="Example: longtail-train fit recipe.toml --out bundle --set model.dim=64")
def fit(
    recipe: _RecipeFile,
    out: _Out,
    warm_start: _WarmStart = None,
    track: Annotated[
        list[str] | None, typer.Option("--track", help="mlflow or wandb: keep settings and figures there too.")
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(
            "--process",
            metavar="I@HOST:PORT",
            help="If several train together: number of this process, and address of process 0 (default: from SLURM).",
        ),
    ] = None,
    set_: _Set = None,
) -> None:
    """Train a recipe, evaluate it, write a bundle.

    The default λ is chosen on valid, the figures are those of test. Run again to resume.
    """
    checked = _load_recipe(recipe, set_)
    _choose_backend(checked)
    with importing():
        from longtail.trainer import Reporter, job

    cluster = Cluster()
    if process is not None:
        number, _, address = process.partition("@")
        if not (number.isdecimal() and address):
            raise RecipeError(f"--process: expected I@HOST:PORT, such as 1@host-0:8476, received {process!r}")
        cluster = Cluster(address, int(number))
    job.fit(checked, out, Reporter(), warm_start=warm_start, track=track or [], cluster=cluster)
    if not WORLD.process:
        say_next("longtail-index", "build", out, "--releases", "releases", "--publish")


@app.command(epilog="Example: longtail-train tune recipe.toml --out study --set tune.trials=30")
def tune(
    recipe: _RecipeFile,
    out: Annotated[Path, typer.Option("--out", help="Directory of the study: a new one, or one to resume.")],
    storage: Annotated[
        str | None, typer.Option("--storage", help="URL of an Optuna storage that several machines share.")
    ] = None,
    set_: _Set = None,
) -> None:
    """Search the ranges in [tune] for the best recipe. Trials are compared on valid. Run again to continue."""
    checked = _load_recipe(recipe, set_)
    _choose_backend(checked)
    with importing():
        from longtail.trainer import Reporter, study

    study.tune(checked, out, Reporter(), storage=storage)


@app.command(epilog="Example: longtail-train check recipe.toml")
def check(
    recipe: _RecipeFile,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    set_: _Set = None,
) -> None:
    """Read a recipe and its data, and report on both. Nothing is trained. Exit code 1 if fit would refuse it."""
    from longtail.trainer import check as checking

    report = checking.check(recipe, overrides=set_ or [])
    if json_:
        print(json.dumps({"ok": report.ok} | asdict(report), indent=1, ensure_ascii=False))
    else:
        checking.show(report, Console())
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: longtail-train evaluate bundle --target-prior uniform")
def evaluate(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle directory.")],
    recipe: Annotated[Path | None, typer.Option("--recipe", help="Measure again on this recipe's data.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown with intervals.")] = False,
    target_prior: Annotated[
        str | None,
        typer.Option(
            metavar="uniform|train|FILE",
            help="Recall on valid if its labels were drawn so, as fit measured it, and the λ that is best there; "
            "FILE has columns label and share.",
        ),
    ] = None,
    rolling: Annotated[
        int | None,
        typer.Option(metavar="N", help="Cut test into N periods, and refresh the forecast of popularity before each."),
    ] = None,
    set_: _Set = None,
) -> None:
    """Print a bundle's evaluation, stored or measured again."""
    if target_prior is not None and (recipe is not None or set_):
        raise RecipeError("--target-prior: expected a bundle alone, whose valid figures it reweighs")
    with importing():
        from longtail.trainer.evaluation import bundle as measured, tables, target

    if target_prior is not None:
        Console().print(tables.target_table(target.HitsByLabel.read(bundle), target_prior).rich())
        return
    if rolling is not None:
        if recipe is None or rolling < 1:
            raise RecipeError("--rolling: expected --recipe with it, and at least one period")
        figures = measured.evaluate_rolling(bundle, recipe, rolling, overrides=set_ or [])
        metric = _load_recipe(recipe, set_).evaluation.metric
        Console().print(tables.rolling_table(figures, bundle.name, metric).rich())
        return
    result = measured.evaluate(bundle, recipe, overrides=set_ or [])
    if markdown:
        print(tables.evaluation_markdown(result.dial, result.metric))
    else:
        title = f"{result.name}: {result.bias_removal.curve_split}"
        Console().print(tables.evaluation_table(title, result.dial, result.metric).rich())
    if result.left_out is not None:
        print(f"\n{result.left_out}." if markdown else result.left_out)


@app.command(epilog="Example: longtail-train upload bundle s3://bucket/bundles/shop")
def upload(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle directory.")],
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="URL of the copy: s3://bucket/bundles/shop, or models:/shop@ALIAS of MLflow."
        ),
    ],
) -> None:
    """Copy a bundle to an object store or to MLflow's registry.

    The registry gets a new version. longtail-index build takes the URL. Run again to resume.
    """
    from longtail.bundle import registry, remote

    if registry.is_registered(url):
        version = registry.upload_version(bundle, url)
        print(f"registered: {version.source}, run {version.run}")
        return
    remote.upload_bundle(bundle, url)
    print(f"uploaded: {url}")


def _load_recipe(path: Path, overrides: list[str] | None) -> Recipe:
    from longtail.trainer.config import load_recipe

    return load_recipe(path, overrides or [])


def _choose_backend(recipe: Recipe) -> None:
    """Choose JAX for several devices, unless KERAS_BACKEND is set."""
    if recipe.training.devices == "all":
        check_installed()
        os.environ.setdefault("KERAS_BACKEND", "jax")


def main() -> None:
    """Run the command.

    A TrainerError, DataError, BundleError or OSError is one line on stderr and exit code 2. The loss of another process
    is exit code 3, unless JAX ends this process first.
    """
    from longtail.bundle import BundleError
    from longtail.trainer.quiet import quiet_tensorflow

    quiet_tensorflow()
    try:
        app()
    except (TrainerError, DataError, BundleError, OSError) as error:
        print(f"longtail-train: {error}", file=sys.stderr, flush=True)
        if WORLD.processes > 1:
            os._exit(2)  # without cleanup, in which this process and the others would wait for each other
        sys.exit(2)
    except Exception as error:
        if (line := describe_lost_process(error)) is None:
            raise
        print(f"longtail-train: {line}", file=sys.stderr, flush=True)
        os._exit(3)
