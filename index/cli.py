"""`longtail-index`: build, publish, roll back, list, verify and prune releases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from longtail.bundle import BundleError
from longtail.index.construct.spec import IndexSpec
from longtail.index.errors import LongtailIndexError
from longtail.index.manifests import Device, RecallAt
from longtail.index.release import building
from longtail.index.release.bucket_floors import BucketFloors
from longtail.index.release.merge import merge_labels
from longtail.index.release.releases import Releases

app = typer.Typer(
    help="Build FAISS indexes over bundles and decide which release serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PIPED_WIDTH = 160

ReleasesArgument = Annotated[Path, typer.Argument(metavar="RELEASES", help="Directory of releases.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A release in it.")]
FloorOption = Annotated[
    list[str] | None,
    typer.Option(metavar="BUCKET=VALUE", help="Least offline recall of head, torso, tail or new; over promise.toml's."),
]
MaxDropOption = Annotated[
    str | None, typer.Option(metavar="SHARE", help="Most of CURRENT's recall that a bucket may lose, such as 10%.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Publish although a bucket is below its floor, or clients lose something.")
]
StateOption = Annotated[
    Path | None,
    typer.Option(envvar="LONGTAIL_STATE", help="The service's state: labels added to it [default: RELEASES/.state]."),
]


@app.command()
def build(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory that a training run exported.")],
    releases: Annotated[Path, typer.Option(help="Directory of releases; made if missing.")],
    spec: Annotated[str, typer.Option(help="auto, flat, ivf_flat, ivf_pq, hnsw, or a FAISS factory string.")] = "auto",
    name: Annotated[str | None, typer.Option(help="Release name; UTC time and bundle name if not given.")] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Point CURRENT at the new release.")] = False,
    device: Annotated[str, typer.Option(help="cpu or gpu: where FAISS trains.")] = "cpu",
    recall_floor: Annotated[float, typer.Option(help="Least recall@100 at every measured λ and μ.")] = 0.95,
    floor: FloorOption = None,
    max_drop: MaxDropOption = None,
    force: ForceOption = False,
    state: StateOption = None,
) -> None:
    """Index a bundle, measure recall against exact search, write a release."""
    checked = _device(device)
    if not publish and (floor or max_drop or force):
        raise LongtailIndexError("--floor, --max-drop and --force: expected --publish with them, received none")
    floors = BucketFloors.read(releases, floors=floor or (), max_drop=max_drop) if publish else None
    with Console(stderr=True).status("load and verify the bundle") as status:
        manifest = building.build(
            bundle,
            releases,
            spec=IndexSpec(spec, recall_floor),
            name=name,
            device=checked,
            progress=lambda line: status.update(line),
        )
    print(f"{manifest.name}: {manifest.kind} over {manifest.labels:,} labels")
    print(f"recall@{manifest.recall_k} at λ: {_recalls(manifest.recall)}")
    print(f"written: {releases / manifest.name}")
    if floors is not None:
        _publish(releases, manifest.name, floors, force=force, state=state)


@app.command()
def publish(
    releases: ReleasesArgument,
    name: NameArgument,
    floor: FloorOption = None,
    max_drop: MaxDropOption = None,
    force: ForceOption = False,
    state: StateOption = None,
) -> None:
    """Verify a release, hold it to the bucket floors of promise.toml and to what clients of CURRENT send, and point
    CURRENT at it.
    """
    floors = BucketFloors.read(releases, floors=floor or (), max_drop=max_drop)
    _publish(releases, name, floors, force=force, state=state)


@app.command()
def rollback(releases: ReleasesArgument) -> None:
    """Point CURRENT back at the release published before."""
    print(f"published: {Releases(releases).rollback()}")


@app.command("list")
def list_(releases: ReleasesArgument) -> None:
    """Show every release; * marks the published one."""
    shelf = Releases(releases)
    current = shelf.current()
    table = Table("", "release", "created (UTC)", "labels", "spec", "recall at λ", "size")
    for name in shelf.names():
        mark = "*" if name == current else ""
        try:
            manifest = shelf.manifest(name)
        except (LongtailIndexError, BundleError) as error:
            table.add_row(mark, name, "unreadable", "", "", str(error), "")
            continue
        spec = manifest.spec if manifest.spec == manifest.kind else f"{manifest.spec} ({manifest.kind})"
        created = f"{manifest.created_at:%Y-%m-%d %H:%M:%S}"
        size = f"{shelf.bytes(name) / 1e6:.1f} MB"
        table.add_row(mark, name, created, f"{manifest.labels:,}", spec, _recalls(manifest.recall), size)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    console.print(table)


@app.command()
def merge(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, or RELEASE/bundle.")],
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Label changes of a service: STATE/labels.log.")],
    out: Annotated[Path, typer.Option(help="Directory of the new bundle; must not exist.")],
) -> None:
    """Take labels added and hidden while serving into a bundle, for the next build."""
    report = merge_labels(bundle, log, out)
    print(
        f"{report.labels:,} labels: {report.added:,} added, {report.reembedded:,} embedded anew, "
        f"{report.removed:,} removed"
    )
    for id_, why in report.skipped.items():
        print(f"left out: {id_}: {why}")
    print(f"written: {out}")


@app.command()
def verify(releases: ReleasesArgument, name: NameArgument) -> None:
    """Read every byte of a release and compare it with what was written."""
    release = Releases(releases).verify(name)
    files = len(release.manifest.files) + len(release.bundle.manifest.files) + 2
    print(f"intact: {name}, {files} files, {release.searcher.labels:,} labels")


@app.command()
def prune(
    releases: ReleasesArgument,
    keep: Annotated[int, typer.Option(help="Newest releases that stay, besides the published and the one before it.")],
) -> None:
    """Delete old releases and the leftovers of killed builds."""
    for name in Releases(releases).prune(keep):
        print(f"deleted: {name}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the user's errors end in one line and exit code 2."""
    try:
        app(arguments)
    except (LongtailIndexError, BundleError, OSError) as error:
        print(f"longtail-index: {error}", file=sys.stderr)
        sys.exit(2)


def _publish(releases: Path, name: str, floors: BucketFloors, *, force: bool, state: Path | None) -> None:
    compared = Releases(releases).compare(name, state=state) if force else None
    report = Releases(releases).publish(name, floors=floors, force=force, state=state)
    for line in report.lines():
        print(line)
    if report.unmet:
        print(f"longtail-index: BUCKET FLOORS NOT MET, {name} is published all the same (--force):", file=sys.stderr)
        for sentence in report.unmet:
            print(f"  {sentence}", file=sys.stderr)
    if compared is not None and (lost := compared.lines()):
        print(
            f"longtail-index: {name} WOULD NOT DO FOR CLIENTS OF {compared.before}, it is published all the same "
            "(--force):",
            file=sys.stderr,
        )
        for sentence in lost:
            print(f"  {sentence}", file=sys.stderr)
    print(f"published: {name}")


def _device(text: str) -> Device:
    if text not in ("cpu", "gpu"):
        raise LongtailIndexError(f"--device: expected cpu or gpu, received {text!r}")
    return "gpu" if text == "gpu" else "cpu"


def _recalls(recall: list[RecallAt]) -> str:
    of_mu = {at: f" (μ {at.popularity:g})" if at.popularity else "" for at in recall}
    return ", ".join(f"{at.bias_removal:g}{mu}: {at.recall:.3f}" for at, mu in of_mu.items())
