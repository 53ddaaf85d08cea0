"""`longtail-index`: build, publish, roll back, list, verify and prune releases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bundle import BundleError
from index.errors import IndexRoomError
from index.manifest import Device, RecallAt
from index.release import build_index
from index.releases import Releases
from index.spec import IndexSpec

app = typer.Typer(
    help="Build FAISS indexes over bundles and decide which release serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PIPED_WIDTH = 160

ReleasesArgument = Annotated[Path, typer.Argument(metavar="RELEASES", help="Directory of releases.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A release in it.")]


@app.command()
def build(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Directory that a training run exported.")],
    releases: Annotated[Path, typer.Option(help="Directory of releases; made if missing.")],
    spec: Annotated[str, typer.Option(help="auto, flat, ivf_flat, ivf_pq, hnsw, or a FAISS factory string.")] = "auto",
    name: Annotated[str | None, typer.Option(help="Release name; UTC time and bundle name if not given.")] = None,
    publish: Annotated[bool, typer.Option("--publish", help="Point CURRENT at the new release.")] = False,
    device: Annotated[str, typer.Option(help="cpu or gpu: where FAISS trains.")] = "cpu",
    recall_floor: Annotated[float, typer.Option(help="Least recall@100 at every measured λ.")] = 0.95,
) -> None:
    """Index a bundle, measure recall against exact search, write a release."""
    checked = _device(device)
    progress = Console(stderr=True)
    with progress.status("load and verify the bundle") as status:
        manifest = build_index(
            bundle,
            releases,
            spec=IndexSpec(spec, recall_floor),
            name=name,
            device=checked,
            report=lambda line: status.update(line),
        )
        if publish:
            status.update(f"publish {manifest.name}")
            Releases(releases).publish(manifest.name)
    print(f"{manifest.name}: {manifest.kind} over {manifest.labels:,} labels")
    print(f"recall@{manifest.recall_k} at λ: {_recalls(manifest.recall)}")
    print(f"{'published' if publish else 'written'}: {releases / manifest.name}")


@app.command()
def publish(releases: ReleasesArgument, name: NameArgument) -> None:
    """Verify a release and point CURRENT at it."""
    Releases(releases).publish(name)
    print(f"published: {name}")


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
        except (IndexRoomError, BundleError) as error:
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
def verify(releases: ReleasesArgument, name: NameArgument) -> None:
    """Read every byte of a release and compare it with what was written."""
    release = Releases(releases).verify(name)
    files = len(release.manifest.files) + len(release.bundle.manifest.files) + 2
    print(f"intact: {name}, {files} files, {release.searcher.labels:,} labels")


@app.command()
def prune(
    releases: ReleasesArgument,
    keep: Annotated[int, typer.Option(help="Newest releases that stay; the published one always stays.")],
) -> None:
    """Delete old releases and the leftovers of killed builds."""
    for name in Releases(releases).prune(keep):
        print(f"deleted: {name}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the user's errors end in one line and exit code 2."""
    try:
        app(arguments)
    except (IndexRoomError, BundleError, OSError) as error:
        print(f"longtail-index: {error}", file=sys.stderr)
        sys.exit(2)


def _device(text: str) -> Device:
    if text not in ("cpu", "gpu"):
        raise IndexRoomError(f"--device: expected cpu or gpu, received {text!r}")
    return "gpu" if text == "gpu" else "cpu"


def _recalls(recall: list[RecallAt]) -> str:
    return ", ".join(f"{at.bias_removal:g}: {at.recall:.3f}" for at in recall)
