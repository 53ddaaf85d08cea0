"""Train, load, take over vectors, and audit lists, from frames or files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.frames import Source, as_sources, write_frame

if TYPE_CHECKING:
    from longtail.model import Model
    from longtail.trainer import Recipe, Reporter
    from longtail.trainer.audit.measure import Audit


def fit(
    clicks: Source | Recipe, *, query: str | None = None, label: str | None = None, time: str | None = None,
    event: str | None = None, queries: Source = None, labels: Source = None, out: Path | str | None = None,
    overrides: Sequence[str] = (), reporter: Reporter | None = None,
) -> Model:  # fmt: skip
    """Draft a recipe for a log and train.

    Args:
        clicks: interactions: a frame, or a path or URL of tables; or a recipe, or the path of its TOML file.
        query, label, time, event: columns of `clicks`; None detects them.
        queries, labels: feature tables, keyed by the columns of ids in `clicks`: frames, paths or URLs.
        out: directory of the bundle; must not exist. None: a new one below `runs`. The directory `OUT.data` holds the
            recipe and the frames. Edit the recipe and run `longtail-train fit OUT.data/recipe.toml` to train again.
        overrides: `KEY=VALUE` overrides of the recipe, such as `model.dim=32`.

    Raises:
        DataError, RecipeError: the data does not give a recipe, or a column is not there; no files are left.
        BundleExistsError: `out` exists.
    """
    from longtail.trainer.quiet import quiet_tensorflow

    quiet_tensorflow()
    from rich.console import Console

    from longtail.bundle.store import refuse_existing
    from longtail.model import Model
    from longtail.trainer import Recipe, Reporter, fit as train, load_recipe
    from longtail.trainer.init.recipe import draft_recipe

    out = _out(out)
    if isinstance(clicks, Recipe) or (isinstance(clicks, str | Path) and str(clicks).endswith(".toml")):
        if any(value is not None for value in (query, label, time, event, queries, labels)):
            raise TypeError(
                "columns and tables are not allowed with a recipe because the recipe names them; change the recipe"
            )
        return Model(train(clicks, out, reporter, overrides=overrides))
    reporter = reporter or Reporter(Console())
    folder = out.with_name(f"{out.name}.data")
    for path in (out, folder):
        refuse_existing(path)
    folder.mkdir(parents=True)
    recipe = folder / "recipe.toml"
    try:
        sources = {"clicks": clicks, "queries": queries, "labels": labels}
        tables = {
            name: Path(write_frame(source, folder / f"{name}.parquet"))
            for name, source in sources.items() if source is not None
        }  # fmt: skip
        roles = draft_recipe(
            tables["clicks"], recipe, queries=tables.get("queries"), labels=tables.get("labels"), query_id=query,
            label_id=label, timestamp=time, event=event,
        )  # fmt: skip
        checked = load_recipe(recipe, overrides)
    except BaseException:
        shutil.rmtree(folder)
        raise
    for line in [*roles.lines(), f"recipe    {recipe}"]:
        reporter.say(line)
    return Model(train(checked, out, reporter), query_id=roles.query_id)


def load(source: Path | str, release: str | None = None) -> Model:
    """Load releases, one release or a bundle, without TensorFlow.

    Labels that a service has added or hidden since are not in it.

    Args:
        release: name of a release of a releases directory; None: the published one.

    Raises:
        LongtailIndexError, BundleError: there is no such release, or it is damaged.
    """
    from longtail.bundle import Bundle
    from longtail.index import ReleaseNotFoundError, open_releases
    from longtail.model import Model
    from longtail.serving.core.loader import load_release

    path = Path(source)
    if (path / "manifest.json").exists():
        return Model(Bundle.load(path))
    if (path / "release.json").exists():
        source, release = path.resolve().parent, path.resolve().name
    releases = open_releases(source)
    name = release or releases.current()
    if name is None:
        raise ReleaseNotFoundError(f"{source}: expected a bundle, a release or a directory with a published release")
    retriever = load_release(releases, name)
    return Model(retriever.bundle, retriever=retriever)


def from_vectors(
    labels: Source, *, out: Path | str | None = None, queries: Source = None, pairs: Source = None,
    name: str = "vectors", **options: Any,
) -> Model:  # fmt: skip
    """Make a model of label vectors that another library trained.

    Args:
        labels: frame, path or URL of a table with columns of ids, of training pairs and of vectors; other columns are
            shown.
        queries: example queries with a column of vectors.
        pairs: log of who chose what, for the term of co-occurrence.
        out: directory of the bundle; must not exist. None: a new one below `runs`.
        options: `id`, `count`, `vector`: names of columns; `similarity`, `temperature`, … of `VectorFiles`.

    Raises:
        LongtailIndexError, BundleError: a table is wrong; no files are left.
    """
    from longtail.index.building.vectors import VectorFiles
    from longtail.model import Model

    with as_sources(labels=labels, queries=queries, pairs=pairs) as paths:
        options |= paths
        bundle = VectorFiles(**options).read(name, lambda _: None)
        return Model(bundle.write(_out(out)))


def audit(
    lists: Source, train: Source, test: Source, *, query: str = "user_id", label: str = "item_id",
    time: str | None = None, k: int = 20, valid: Source = None, queries: Source = None, labels: Source = None,
    **options: Any,
) -> Audit:  # fmt: skip
    """Measure a recommender's lists by bucket and compare baselines.

    Args:
        lists: a row for each query and label, best first or with a `rank` or `score`; or a list for each query.
        train, valid, test: interactions that a model learns from, is chosen by, and is to find.
        query, label, time: columns of ids and times, in every table.
        k: length of the lists.
        queries, labels: tables of queries, with the columns of `groups`, and of the catalogue.
        options: `groups`, `baselines`, `rank`, `score`, `buckets`, `exclude_seen`.

    Raises:
        DataError, RecipeError: a table cannot be read, or arguments do not go together.
    """
    from longtail.trainer.audit.measure import AuditInputs, audit as measure

    with as_sources(lists=lists, train=train, test=test, valid=valid, queries=queries, labels=labels) as paths:
        options |= {name: [str(path)] for name, path in paths.items()} | {"lists": paths["lists"]}
        return measure(AuditInputs(query_id=query, label_id=label, timestamp=time, ks=(k,), **options))


def _out(out: Path | str | None) -> Path:
    return Path("runs", f"{datetime.now(UTC):%Y%m%d-%H%M%S}") if out is None else Path(out)
