"""`longtail-index`: build, publish, roll back, list, verify and prune releases."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import JsonValue
from rich.console import Console
from rich.status import Status

from longtail.bundle import BundleError, LabelChanges
from longtail.bundle.dates import span_seconds
from longtail.bundle.manifest import LogColumns
from longtail.bundle.promise import QualityPromise
from longtail.bundle.report_table import ReportTable
from longtail.bundle.vectors import SIMILARITIES
from longtail.commands.app import app_of_commands, say_next
from longtail.index.building import build as building
from longtail.index.building.build import source_of
from longtail.index.building.merge import merge_labels
from longtail.index.building.priors import Limits, PriorTable
from longtail.index.building.queries import QueryTable
from longtail.index.building.vectors import VectorFiles
from longtail.index.errors import LongtailIndexError, NothingNewError
from longtail.index.manifests import Device, RecallAt, ReleaseManifest
from longtail.index.recall import Progress
from longtail.index.release.releases import Releases
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
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A release in it.")]
PriorOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=MIN:MAX[:DEFAULT]", help="Weights that requests may give a prior, such as recent=0:2."),
]
BonusOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=FILTER",
        help='Labels that requests may give a bonus, as a filter in JSON: promoted=\'{"seller": "s1"}\'.',
    ),
]
DecayOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN[=HALF_LIFE]",
        help="Column of dates by which scores may decay, and the shortest half-life at weight 1 (default: 1d).",
    ),
]
SlopeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN[=MIN:MAX]", help="Column of numbers to weigh, in nats per unit, such as price=-0.1:0.1."
    ),
]
ExposedOption = Annotated[
    str | None,
    typer.Option(
        metavar="HALF_LIFE[=MIN:MAX[:DEFAULT]]",
        help="Prior of shares of places in the service's answers, such as 7d or 7d=-1:0:-0.3 (default weights: -1:1).",
    ),
]
MissingOption = Annotated[
    str | None,
    typer.Option(metavar="min|median|NUMBER", help="Prior of labels that the table lacks (default: refuse the table)."),
]

PublishOption = Annotated[bool, typer.Option("--publish", help="Point CURRENT at the new release.")]
SourceOption = Annotated[
    str | None, typer.Option("--from", metavar="NAME", help="The release to begin with (default: CURRENT).")
]
SpecOption = Annotated[
    str, typer.Option(help="auto, flat, ivf_flat, ivf_sq, ivf_fastscan, milvus, milvus_flat or milvus_ivf_flat.")
]
NameOption = Annotated[str | None, typer.Option(help="Release name; UTC time and bundle name if not given.")]

_PIPED_WIDTH = 160


@app.command(epilog="Example: longtail-index build bundle --releases releases --publish")
def build(
    bundle: BundleArgument,
    releases: ReleasesOption,
    spec: SpecOption = "auto",
    name: NameOption = None,
    publish: PublishOption = False,
    device: Annotated[str, typer.Option(help="cpu or gpu: where FAISS trains.")] = "cpu",
    recall_floor: Annotated[float, typer.Option(help="Least recall@100 at every measured λ and μ.")] = 0.95,
    priors: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Path or URL: label_id and a column of numbers per prior.")
    ] = None,
    prior: PriorOption = None,
    missing: MissingOption = None,
    bonus: BonusOption = None,
    decay: DecayOption = None,
    slope: SlopeOption = None,
    exposed: ExposedOption = None,
    filterable: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,…",
            help="Display columns that requests may filter by, with commas between them; all that filters are for, but "
            "strings of more than 65,536 values, if not given, none if empty.",
        ),
    ] = None,
    lists_of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take over kind and lists of this release, so that nothing is clustered."),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(metavar="TABLE", help="Known queries, for POST /v1/queries: ids, features, columns to filter by."),
    ] = None,
    query_id: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of ids in --queries (default: the bundle's).")
    ] = None,
    query_choices: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Choices that each of --queries is expected to make.")
    ] = None,
) -> None:
    """Index a bundle and write a release. Recall is measured against exact search."""
    checked, promise = _device(device), Releases(releases).promise() if publish else None
    table = _table_of(priors, prior, missing)
    notes: list[str] = []
    with Console(stderr=True).status("load and verify the bundle") as status:
        manifest = building.build(
            bundle,
            releases,
            spec=IndexSpec(spec, recall_floor),
            name=name,
            device=checked,
            priors=table,
            bonuses=dict(map(_bonus, bonus or ())),
            decay={column: half_life or "1d" for column, _, half_life in (text.partition("=") for text in decay or ())},
            slopes=dict(Limits.parse(text) if "=" in text else (text, None) for text in slope or ()),
            exposed=exposed,
            progress=_progress(status, notes),
            filterable=None
            if filterable is None
            else [name for part in filterable.split(",") if (name := part.strip())],
            lists_of=lists_of,
            queries=None if queries is None else QueryTable(as_source(queries), query_id, query_choices),
        )
    _report(releases, manifest, notes, published=publish)
    if promise is not None:
        _publish(releases, manifest.name, promise)


@app.command(epilog="Example: longtail-index from-vectors items.parquet --releases releases")
def from_vectors(
    labels: Annotated[
        str, typer.Argument(metavar="LABELS", help="Table of label ids, counts, vectors, and columns to show.")
    ],
    releases: ReleasesOption,
    vectors: Annotated[Path | None, typer.Option(help="The vectors as .npy, rows in the order of LABELS.")] = None,
    queries: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Example queries: a table with the vector column, or .npy.")
    ] = None,
    id_column: Annotated[str, typer.Option("--id", metavar="COLUMN", help="Column of ids.")] = "label_id",
    vector: Annotated[str, typer.Option(metavar="COLUMN", help="Column of vectors.")] = "vector",
    count: Annotated[str, typer.Option(metavar="COLUMN", help="Column of training pairs, whole numbers.")] = "count",
    noise: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the noise ν of training (default: ν is π).")
    ] = None,
    similarity: Annotated[str, typer.Option(help="dot, cosine or l2.")] = "dot",
    temperature: Annotated[float, typer.Option(min=1e-6, help="What training divided scores by.")] = 1.0,
    tower: Annotated[Path | None, typer.Option(metavar="ONNX", help="Query tower of float inputs.")] = None,
    label_tower: Annotated[Path | None, typer.Option(metavar="ONNX", help="Label tower of float inputs.")] = None,
    pairs: Annotated[
        str | None, typer.Option(metavar="LOG", help="Who chose what: adds the term of co-occurrence.")
    ] = None,
    query_id: Annotated[str, typer.Option(metavar="COLUMN", help="Column of query ids in LOG.")] = "query_id",
    pair_label: Annotated[
        str, typer.Option("--label-id", metavar="COLUMN", help="Column of label ids in LOG.")
    ] = "label_id",
    timestamp: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of times in LOG (default: rows are in their order).")
    ] = None,
    remember: Annotated[int, typer.Option(min=0, help="Last labels to keep of each query of LOG.")] = 50,
    spec: SpecOption = "auto",
    name: NameOption = None,
    publish: PublishOption = False,
) -> None:
    """Index vectors of any two-tower model. Requests to that release have the dial, too."""
    if similarity not in SIMILARITIES:
        raise LongtailIndexError(f"--similarity: expected dot, cosine or l2, received {similarity!r}")
    promise = Releases(releases).promise() if publish else None
    files = VectorFiles(
        as_source(labels), vectors, None if queries is None else as_source(queries), id_column, vector, count, noise,
        similarity, temperature, tower, label_tower, pairs if pairs is None else as_source(pairs),
        LogColumns(query_id=query_id, label_id=pair_label, timestamp=timestamp or "time"), timestamp is not None,
        remember,
    )  # fmt: skip
    notes: list[str] = []
    with Console(stderr=True).status("read the vectors") as status:
        progress = _progress(status, notes)
        manifest = building.build_from_vectors(files, releases, spec=spec, name=name, progress=progress)
    _report(releases, manifest, notes, published=publish)
    if promise is not None:
        _publish(releases, manifest.name, promise)


@app.command(epilog="Example: longtail-index priors releases margins.parquet --publish")
def priors(
    releases: ReleasesArgument,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Path or URL of the named priors of the release.")],
    source: SourceOption = None,
    name: NameOption = None,
    prior: PriorOption = None,
    missing: MissingOption = None,
    publish: PublishOption = False,
) -> None:
    """Write a release with other named priors, without training."""
    notes: list[str] = []
    with Console(stderr=True).status("load and verify the release") as status:
        progress = _progress(status, notes)
        given = _prior_table(table, prior, missing)
        manifest = building.refresh_priors(releases, given, source=source, name=name, progress=progress)
    _report(releases, manifest, notes, published=publish)
    if publish:
        _publish(releases, manifest.name)


@app.command(epilog="Example: longtail-index refresh releases clicks.parquet --publish")
def refresh(
    releases: ReleasesArgument,
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="Pairs since the release was trained or refreshed: path or URL.")
    ],
    whole: Annotated[
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
    source: SourceOption = None,
    name: NameOption = None,
    publish: PublishOption = False,
) -> None:
    """Write a release that knows later pairs.

    Its forecast of popularity and its co-occurrence take them in, without training. A log without later pairs writes
    nothing, and is no error.
    """
    if publish and Releases(releases).pointers().held:
        raise LongtailIndexError(
            f"{releases}: expected a release that was published, found one after a rollback, which holds until "
            "`longtail-index publish`; refresh without --publish"
        )
    notes: list[str] = []
    with Console(stderr=True).status("load and verify the release") as status:
        changes = None if labels is None else _label_changes(labels)
        try:
            manifest = building.refresh(
                releases, as_source(log), whole=whole, changes=changes, source=source, name=name,
                ahead=every, progress=_progress(status, notes),
            )  # fmt: skip
        except NothingNewError as nothing:
            typer.echo(f"nothing to do: {nothing}", err=True)
            return
    _report(releases, manifest, notes, published=publish)
    if publish:
        _publish(releases, manifest.name)


@app.command(epilog="Example: longtail-index publish releases books-2")
def publish(
    releases: ReleasesArgument,
    name: NameArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Publish although a bucket is below its floor, or clients lose something.")
    ] = False,
) -> None:
    """Point CURRENT at a release that passes every check.

    The release must be intact, meet promise.toml, and take what clients of CURRENT send.
    """
    _publish(releases, name, force=force)


@app.command(epilog="Example: longtail-index stage releases books-2")
def stage(releases: ReleasesArgument, name: NameArgument) -> None:
    """Send a release a share of live queries as shadow traffic. The release is verified, and not published."""
    Releases(releases).stage(name)
    print(f"staged: {name}")


@app.command(epilog="Example: longtail-index unstage releases")
def unstage(releases: ReleasesArgument) -> None:
    """End shadow traffic."""
    print(f"no longer staged: {Releases(releases).unstage() or 'nothing was'}")


@app.command(epilog="Example: longtail-index rollback releases")
def rollback(releases: ReleasesArgument) -> None:
    """Point CURRENT back at the release published before."""
    print(f"published: {Releases(releases).rollback()}")
    _say_who_follows(releases)


@app.command("list", epilog="Example: longtail-index list releases")
def list_(releases: ReleasesArgument) -> None:
    """Show every release; * is published, s is staged."""
    shelf = Releases(releases)
    current, staged = shelf.current(), shelf.staged()
    rows: list[list[str]] = []
    for name in shelf.names():
        mark = "*" if name == current else "s" if name == staged else ""
        try:
            manifest = shelf.manifest(name)
        except (LongtailIndexError, BundleError) as error:
            rows.append([mark, name, "unreadable", "", "", str(error), ""])
            continue
        spec = manifest.spec if manifest.spec == manifest.kind else f"{manifest.spec} ({manifest.kind})"
        created = f"{manifest.created_at:%Y-%m-%d %H:%M:%S}"
        size = f"{shelf.bytes(name) / 1e6:.1f} MB"
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
    report = merge_labels(source_of(bundle)[0], state, out)
    print(
        f"{report.labels:,} labels: {report.added:,} added, {report.reembedded:,} changed, {report.removed:,} removed"
    )
    for id_, why in report.skipped.items():
        print(f"left out: {id_}: {why}")
    print(f"written: {out}")
    say_next("longtail-index", "build", out, "--releases", "releases", "--publish")


@app.command(epilog="Example: longtail-index upload releases/books-2 s3://bucket/releases")
def upload(
    release: Annotated[Path, typer.Argument(metavar="RELEASE", help="A release's directory.")],
    releases: ReleasesArgument,
) -> None:
    """Copy a release to the URL of releases, whole or not at all. Run again to go on; publishes nothing."""
    shelf = Releases(releases)
    shelf.upload(release)
    print(f"uploaded: {shelf}/{release.resolve().name}")
    say_next("longtail-index", "publish", releases, release.resolve().name)


@app.command(epilog="Example: longtail-index verify releases books-2")
def verify(releases: ReleasesArgument, name: NameArgument) -> None:
    """Read a release and compare every byte with the manifest."""
    release = Releases(releases).verify(name)
    files = len(release.manifest.files) + len(release.bundle.manifest.files) + 2
    print(f"intact: {name}, {files} files, {release.searcher.labels:,} labels")


@app.command(epilog="Example: longtail-index prune releases --keep 3")
def prune(
    releases: ReleasesArgument,
    keep: Annotated[int, typer.Option(help="Newest releases that stay, besides the published and the one before it.")],
) -> None:
    """Delete old releases and leftovers of killed builds. A release that experiments.toml names stays."""
    for name in Releases(releases).prune(keep, print):
        print(f"deleted: {name}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the user's errors end in one line and exit code 2."""
    try:
        app(arguments)
    except (LongtailIndexError, BundleError, StoreError, OSError) as error:
        print(f"longtail-index: {error}", file=sys.stderr)
        sys.exit(2)


def _publish(releases: str, name: str, promise: QualityPromise | None = None, *, force: bool = False) -> None:
    report = Releases(releases).publish(name, promise=promise, force=force)
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


def _label_changes(state: str) -> LabelChanges:
    try:
        return read_label_changes(state)
    except FileNotFoundError as error:
        raise LongtailIndexError(str(error)) from None


def _table_of(path: str | None, priors: list[str] | None, missing: str | None) -> PriorTable | None:
    if path is not None:
        return _prior_table(path, priors, missing)
    if priors or missing is not None:
        raise LongtailIndexError("--prior and --missing: expected --priors TABLE with them, received none")
    return None


def _bonus(text: str) -> tuple[str, dict[str, JsonValue]]:
    """Parse a bonus's name and filter from `NAME=FILTER`."""
    name, _, filter_ = text.partition("=")
    try:
        conditions = json.loads(filter_)
        if not (name and isinstance(conditions, dict) and conditions):
            raise ValueError(text)
    except ValueError:
        raise LongtailIndexError(
            f'--bonus: expected NAME=FILTER, such as promoted=\'{{"seller": "s1"}}\', received {text!r}'
        ) from None
    return name, conditions


def _prior_table(path: str, priors: list[str] | None, missing: str | None) -> PriorTable:
    words: dict[str, Literal["min", "median"]] = {"min": "min", "median": "median"}
    fill: float | Literal["min", "median"] | None = words.get(missing or "")
    if missing is not None and fill is None:
        try:
            fill = float(missing)
        except ValueError:
            raise LongtailIndexError(f"--missing: expected min, median or a number, received {missing!r}") from None
    return PriorTable(as_source(path), dict(map(Limits.parse, priors or ())), fill)


def _progress(status: Status, notes: list[str]) -> Progress:
    """Create a callback that shows progress, and collects lines to print later in `notes`."""

    def tell(line: str) -> None:
        status.update(line)
        if line.startswith(("priors: ", "queries: ", "pairs: ", "labels: ", "λ: ")):
            notes.append(line)

    return tell


def _report(releases: str, manifest: ReleaseManifest, notes: list[str], *, published: bool) -> None:
    print(f"{manifest.name}: {manifest.kind} over {manifest.labels:,} labels")
    if (registered := manifest.registered) is not None:
        print(f"from {registered.source}, run {registered.run}")
    for note in notes:
        print(note)
    for line in _summary(manifest):
        print(line)
    print(f"written: {Releases(releases)}/{manifest.name}")
    if not published:
        say_next("longtail-index", "publish", releases, manifest.name)


def _device(text: str) -> Device:
    if text not in ("cpu", "gpu"):
        raise LongtailIndexError(f"--device: expected cpu or gpu, received {text!r}")
    return "gpu" if text == "gpu" else "cpu"


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
    """Describe recall along λ and μ, and the lowest recall at other weights of the priors."""
    default = recall[0].priors
    along = [at for at in recall if at.priors == default]
    shown = [
        f"{at.bias_removal:g}{f' (μ {at.popularity:g})' if at.popularity else ''}: {at.recall:.3f}" for at in along
    ]
    if others := [at for at in recall if at.priors != default]:
        lowest = min(others, key=lambda at: at.recall)
        shown.append(f"at {len(others)} other weights {lowest.recall:.3f} or more ({lowest.where})")
    return ", ".join(shown)
