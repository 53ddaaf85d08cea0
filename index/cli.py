"""`longtail-index`: build, publish, roll back, list, verify and prune releases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from longtail.bundle import BundleError
from longtail.bundle.dates import span_seconds
from longtail.bundle.promise import QualityPromise
from longtail.bundle.report_table import ReportTable
from longtail.bundle.vectors import SIMILARITIES
from longtail.commands.app import app_of_commands, say_next
from longtail.index.building.build import build, build_from_vectors, bundle_path
from longtail.index.building.merge import merge_labels
from longtail.index.building.priors import PriorSpec
from longtail.index.building.refresh import RefreshOptions, refresh, refresh_priors
from longtail.index.building.vectors import VectorFiles
from longtail.index.errors import LongtailIndexError, NothingNewError
from longtail.index.manifests import Device, RecallAt, ReleaseManifest
from longtail.index.release.releases import find_release, open_releases, split_release
from longtail.index.spec import IndexSpec
from longtail.state import StoreError, read_label_changes
from longtail.tables import as_source

app = app_of_commands("Build FAISS indexes over bundles and decide which release serves.")

ReleasesArgument = Annotated[
    str, typer.Argument(metavar="RELEASES", help="Directory of releases, or its URL, such as s3://bucket/releases.")
]
ReleasesOption = Annotated[
    str, typer.Option(metavar="RELEASES", help="Directory of releases, made if missing, or its URL.")
]
BundleArgument = Annotated[
    str,
    typer.Argument(metavar="BUNDLE", help="A bundle, or RELEASE/bundle; a directory, its URL, or models:/NAME@ALIAS."),
]
ReleaseArgument = Annotated[
    str, typer.Argument(metavar="RELEASE", help="A release's directory or URL, such as releases/shop-2.")
]
SourceArgument = Annotated[
    str,
    typer.Argument(metavar="RELEASES", help="Directory or URL of releases, or the release to begin with (CURRENT)."),
]
SpecOption = Annotated[
    str, typer.Option(help="auto, flat, ivf_flat, ivf_sq, ivf_fastscan, milvus, milvus_flat or milvus_ivf_flat.")
]
NameOption = Annotated[str | None, typer.Option(help="Release name; UTC time and bundle name if not given.")]
PublishOption = Annotated[bool, typer.Option("--publish", help="Point CURRENT at the new release.")]

_PIPED_WIDTH = 160
_NOTED = ("priors: ", "queries: ", "pairs: ", "labels: ", "λ: ")
"""Beginnings of progress lines that stay in the report."""


@dataclass(frozen=True)
class IndexOptions:
    """Kind of index to build."""

    spec: SpecOption = "auto"
    device: Annotated[str, typer.Option(help="cpu or gpu: where FAISS trains.")] = "cpu"
    recall_floor: Annotated[float, typer.Option(help="Least recall@100 at every measured λ and μ.")] = 0.95
    lists_of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take over kind and lists of this release, so that nothing is clustered."),
    ] = None

    def index_spec(self) -> IndexSpec:
        """Create the spec of the index."""
        if self.device not in ("cpu", "gpu"):
            raise LongtailIndexError(f"--device: expected cpu or gpu, received {self.device!r}")
        return IndexSpec(self.spec, self.recall_floor, cast("Device", self.device), self.lists_of)


@dataclass(frozen=True)
class VectorOptions:
    """Vectors of another library's model."""

    vectors: Annotated[Path | None, typer.Option(help="The vectors as .npy, rows in the order of LABELS.")] = None
    queries: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Example queries: a table with a column `vector`, or .npy.")
    ] = None
    similarity: Annotated[str, typer.Option(help="dot, cosine or l2.")] = "dot"
    temperature: Annotated[float, typer.Option(min=1e-6, help="What training divided scores by.")] = 1.0
    tower: Annotated[
        list[Path] | None, typer.Option(metavar="ONNX", help="Query tower of float inputs, then the label tower.")
    ] = None
    pairs: Annotated[
        str | None,
        typer.Option(metavar="LOG", help="Log of choices: query id, `label_id`, optional `time`; adds co-occurrence."),
    ] = None

    def files(self, labels: str) -> VectorFiles:
        """Create the description of the files."""
        if self.similarity not in SIMILARITIES:
            raise LongtailIndexError(f"--similarity: expected dot, cosine or l2, received {self.similarity!r}")
        towers = self.tower or []
        if len(towers) > 2:
            raise LongtailIndexError(f"--tower: expected the query tower, then the label tower, received {len(towers)}")
        query_tower, label_tower = [*towers, None, None][:2]
        return VectorFiles(
            as_source(labels),
            vectors=self.vectors,
            queries=None if self.queries is None else as_source(self.queries),
            similarity=self.similarity,
            temperature=self.temperature,
            query_tower=query_tower,
            label_tower=label_tower,
            pairs=None if self.pairs is None else as_source(self.pairs),
        )


@app.command("build", epilog="Example: longtail-index build bundle --releases releases --publish")
def build_(
    bundle: BundleArgument,
    releases: ReleasesOption,
    index: IndexOptions,
    name: NameOption = None,
    publish: PublishOption = False,
    priors: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Named priors: a table, or a TOML file with limits, bonuses, decays, slopes."
        ),
    ] = None,
    filterable: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,…",
            help="Display columns that requests may filter by, with commas between them; all that filters are for, but "
            "strings of more than 65,536 values, if not given, none if empty.",
        ),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="TABLE",
            help="Known queries, for POST /v1/queries: ids, features, columns to filter by; `choices` that each is "
            "expected to make (default: 1).",
        ),
    ] = None,
) -> None:
    """Index a bundle and write a release. Recall is measured against exact search."""
    columns = None if filterable is None else [name for part in filterable.split(",") if (name := part.strip())]
    spec, prior_spec = index.index_spec(), None if priors is None else PriorSpec.load(priors)
    known_queries = None if queries is None else as_source(queries)
    write = partial(
        build, bundle, releases, spec=spec, name=name, priors=prior_spec, filterable=columns, queries=known_queries
    )
    _write_release(releases, publish, "load and verify the bundle", write)


@app.command(epilog="Example: longtail-index from-vectors items.parquet --releases releases")
def from_vectors(
    labels: Annotated[
        str,
        typer.Argument(
            metavar="LABELS",
            help="Table of `label_id`, `count`, `vector`, optional `noise`, and columns to show; SELECT … renames.",
        ),
    ],
    releases: ReleasesOption,
    options: VectorOptions,
    spec: SpecOption = "auto",
    name: NameOption = None,
    publish: PublishOption = False,
) -> None:
    """Index vectors of any two-tower model. Requests to that release have the dial, too."""
    write = partial(build_from_vectors, options.files(labels), releases, spec=spec, name=name)
    _write_release(releases, publish, "read the vectors", write)


@app.command(epilog="Example: longtail-index priors releases margins.parquet --publish")
def priors(
    releases: SourceArgument,
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="Named priors of the release, or the TOML file that names the table.")
    ],
    publish: PublishOption = False,
) -> None:
    """Write a release with other named priors, without training."""
    values = PriorSpec.load(table).table
    if values is None:
        raise LongtailIndexError(f"{table}: expected a key `table` that names a table of priors, found none")
    root, release = find_release(releases)
    write = partial(refresh_priors, root, values, source=release)
    _write_release(root, publish, "load and verify the release", write)


@app.command("refresh", epilog="Example: longtail-index refresh releases clicks.parquet --publish")
def refresh_(
    releases: SourceArgument,
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="Pairs since the release was trained or refreshed: path or URL.")
    ],
    publish: PublishOption = False,
    whole_log: Annotated[
        bool, typer.Option("--whole", help="LOG is the whole log: make co-occurrence from it, exactly.")
    ] = False,
    labels: Annotated[
        str | None,
        typer.Option(metavar="STATE", help="Take in labels added to this service: its state, or postgresql://…."),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(metavar="SPAN", parser=span_seconds, help="Forecast the time until the next refresh, such as 1h."),
    ] = None,
) -> None:
    """Write a release that knows later pairs.

    Its forecast of popularity and its co-occurrence take them in, without training. A log without later pairs writes
    nothing, and is no error.
    """
    root, release = find_release(releases)
    if publish and open_releases(root).pointers().is_held:
        raise LongtailIndexError(
            f"{releases}: expected a release that was published, found one after a rollback, which holds until "
            "`longtail-index publish`; refresh without --publish"
        )
    try:
        changes = None if labels is None else read_label_changes(labels)
    except FileNotFoundError as error:
        raise LongtailIndexError(str(error)) from None
    options = RefreshOptions(whole_log=whole_log, changes=changes, ahead=every)
    write = partial(refresh, root, as_source(log), options, source=release)
    _write_release(root, publish, "load and verify the release", write)


@app.command(epilog="Example: longtail-index publish releases/shop-2")
def publish(
    release: ReleaseArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Publish although a bucket is below its floor, or clients lose something.")
    ] = False,
) -> None:
    """Point CURRENT at a release that passes every check.

    The release must be intact, meet promise.toml, and take what clients of CURRENT send.
    """
    _publish(*split_release(release), force=force)


@app.command(epilog="Example: longtail-index stage releases/shop-2")
def stage(release: ReleaseArgument) -> None:
    """Send a release a share of live queries as shadow traffic. The release is verified, and not published."""
    releases, name = split_release(release)
    open_releases(releases).stage(name)
    print(f"staged: {name}")


@app.command(epilog="Example: longtail-index unstage releases")
def unstage(releases: ReleasesArgument) -> None:
    """End shadow traffic."""
    print(f"no longer staged: {open_releases(releases).unstage() or 'nothing was'}")


@app.command(epilog="Example: longtail-index rollback releases")
def rollback(releases: ReleasesArgument) -> None:
    """Point CURRENT back at the release published before."""
    print(f"published: {open_releases(releases).rollback()}")
    _say_who_follows(releases)


@app.command("list", epilog="Example: longtail-index list releases")
def list_(releases: ReleasesArgument) -> None:
    """Show every release; * is published, s is staged."""
    stored = open_releases(releases)
    current, staged = stored.current(), stored.staged()
    rows: list[list[str]] = []
    for name in stored.names():
        mark = "*" if name == current else "s" if name == staged else ""
        try:
            manifest = stored.manifest(name)
        except (LongtailIndexError, BundleError) as error:
            rows.append([mark, name, "unreadable", "", "", str(error), ""])
            continue
        spec = manifest.spec if manifest.spec == manifest.kind else f"{manifest.spec} ({manifest.kind})"
        created = f"{manifest.created_at:%Y-%m-%d %H:%M:%S}"
        size = f"{stored.bytes(name) / 1e6:.1f} MB"
        rows.append([mark, name, created, f"{manifest.labels:,}", spec, _recalls_in_words(manifest.recall), size])
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    headings = ["", "release", "created (UTC)", "labels", "spec", "recall at λ", "size"]
    console.print(ReportTable(headings, rows, name_columns=2).rich())


@app.command(epilog="Example: longtail-index merge releases/b/bundle releases/.state --out merged")
def merge(
    bundle: BundleArgument,
    state: Annotated[
        str, typer.Argument(metavar="STATE", help="Label changes of a service: its state directory, or postgresql://….")
    ],
    out: Annotated[Path, typer.Option(help="Directory of the new bundle; must not exist.")],
) -> None:
    """Take labels added and hidden while serving into a bundle. The next build reads that bundle."""
    report = merge_labels(bundle_path(bundle)[0], state, out)
    print(
        f"{report.labels:,} labels: {report.added:,} added, {report.reembedded:,} changed, {report.removed:,} removed"
    )
    for id_, reason in report.skipped.items():
        print(f"left out: {id_}: {reason}")
    print(f"written: {out}")
    say_next("longtail-index", "build", out, "--releases", "releases", "--publish")


@app.command(epilog="Example: longtail-index upload releases/shop-2 s3://bucket/releases")
def upload(
    release: Annotated[Path, typer.Argument(metavar="RELEASE", help="A release's directory.")],
    releases: ReleasesArgument,
) -> None:
    """Copy a release to the URL of releases, whole or not at all. Run again to go on; publishes nothing."""
    target = open_releases(releases)
    target.upload(release)
    print(f"uploaded: {target}/{release.resolve().name}")
    say_next("longtail-index", "publish", f"{target}/{release.resolve().name}")


@app.command(epilog="Example: longtail-index verify releases/shop-2")
def verify(release: ReleaseArgument) -> None:
    """Read a release and compare every byte with the manifest."""
    releases, name = split_release(release)
    verified = open_releases(releases).verify(name)
    files = len(verified.manifest.files) + len(verified.bundle.manifest.files) + 2
    print(f"intact: {name}, {files} files, {verified.searcher.labels:,} labels")


@app.command(epilog="Example: longtail-index prune releases --keep 3")
def prune(
    releases: ReleasesArgument,
    keep: Annotated[int, typer.Option(help="Newest releases that stay, besides the published and the one before it.")],
) -> None:
    """Delete old releases and leftovers of killed builds. A release that experiments.toml names stays."""
    for name in open_releases(releases).prune(keep, print):
        print(f"deleted: {name}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the user's errors end in one line and exit code 2."""
    try:
        app(arguments)
    except (LongtailIndexError, BundleError, StoreError, OSError) as error:
        print(f"longtail-index: {error}", file=sys.stderr)
        sys.exit(2)


def _publish(releases: str, name: str, promise: QualityPromise | None = None, *, force: bool = False) -> None:
    report = open_releases(releases).publish(name, promise=promise, force=force)
    for line in report.lines:
        print(line)
    if report.unmet:
        print(f"longtail-index: {name} IS PUBLISHED ALL THE SAME (--force):", file=sys.stderr)
        for sentence in report.unmet:
            print(f"  {sentence}", file=sys.stderr)
    print(f"published: {name}")
    _say_who_follows(releases)


def _say_who_follows(releases: str) -> None:
    say_next(
        "longtail-serve", "run", releases,
        note="\na running service checks the release once more before it follows; "
        "GET /v1/release says which one it serves",
    )  # fmt: skip


def _write_release(releases: str, publish: bool, first: str, write: Callable[..., ReleaseManifest]) -> None:
    """Write a release and show the progress; then describe the release, and publish it if requested."""
    # Read before the build, so that a wrong promise.toml costs no build.
    promise = open_releases(releases).promise() if publish else None
    notes: list[str] = []
    with Console(stderr=True).status(first) as status:

        def progress(line: str) -> None:
            status.update(line)
            if line.startswith(_NOTED):
                notes.append(line)

        try:
            manifest = write(progress=progress)
        except NothingNewError as nothing:
            typer.echo(f"nothing to do: {nothing}", err=True)
            return
    print(f"{manifest.name}: {manifest.kind} over {manifest.labels:,} labels")
    if (registered := manifest.registered) is not None:
        print(f"from {registered.source}, run {registered.run}")
    for line in (*notes, *_summary(manifest)):
        print(line)
    print(f"written: {open_releases(releases)}/{manifest.name}")
    if promise is None:
        say_next("longtail-index", "publish", f"{open_releases(releases)}/{manifest.name}")
    else:
        _publish(releases, manifest.name, promise)


def _summary(index: ReleaseManifest) -> list[str]:
    """Summarise recall, the kinds that `auto` compared, and recall under filters."""
    lines = [f"recall@{index.recall_k} at λ: {_recalls_in_words(index.recall)}"]
    for trial in index.kinds:
        rate = "not timed" if trial.queries_per_second is None else f"{trial.queries_per_second:,.0f} queries/s"
        lines.append(
            f"{'*' if trial.kind == index.kind else ' '} {trial.kind}: recall {trial.lowest.recall:.3f} or more, "
            f"{rate}, {trial.bytes_per_label:.1f} bytes per label"
        )
    if (filtered := index.filtered) is not None:
        lowest = [f"{selectivity:.1%} of the labels: {recall:.3f}" for selectivity, recall in filtered.lowest().items()]
        lines.append(f"lowest recall under filters: {', '.join(lowest)}")
    return lines


def _recalls_in_words(recall: Sequence[RecallAt]) -> str:
    """Describe recall along λ and μ, and the lowest at other weights of priors."""
    default = recall[0].priors
    words = [
        f"{point.bias_removal:g}{f' (μ {point.popularity:g})' if point.popularity else ''}: {point.recall:.3f}"
        for point in recall
        if point.priors == default
    ]
    if others := [point for point in recall if point.priors != default]:
        lowest = min(others, key=lambda point: point.recall)
        words.append(f"at {len(others)} other weights {lowest.recall:.3f} or more ({lowest.coordinates})")
    return ", ".join(words)
