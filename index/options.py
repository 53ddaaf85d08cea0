"""Options that commands of `longtail-index` and `longtail-serve` share."""

from __future__ import annotations

from typing import Annotated

import typer

from longtail.state import Place, read_place

ReleasesArgument = Annotated[
    str, typer.Argument(metavar="RELEASES", help="Directory of releases, or its URL, such as s3://bucket/releases.")
]
ReleasesOption = Annotated[
    str, typer.Option(metavar="RELEASES", help="Directory of releases, made if missing, or its URL.")
]
BundleArgument = Annotated[
    str, typer.Argument(metavar="BUNDLE", help="A bundle, or RELEASE/bundle; a directory or its URL.")
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A release in it.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Publish although a bucket is below its floor, or clients lose something.")
]
StateOption = Annotated[
    str | None,
    typer.Option(
        envvar=["LONGTAIL_DATABASE_URL", "LONGTAIL_STATE"],
        metavar="STATE",
        help="The service's state, a directory or postgresql://… (default: RELEASES/.state; of a URL none).",
    ),
]
PriorOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=MIN:MAX[:DEFAULT]", help="Weights that requests may give a prior, such as recent=0:2."),
]
MissingOption = Annotated[
    str | None,
    typer.Option(metavar="min|median|NUMBER", help="Prior of labels that the table lacks (default: refuse the table)."),
]

PublishOption = Annotated[bool, typer.Option("--publish", help="Point CURRENT at the new release.")]
SourceOption = Annotated[
    str | None, typer.Option("--from", metavar="NAME", help="The release to begin with (default: CURRENT).")
]
NameOption = Annotated[str | None, typer.Option(help="Release name; UTC time and bundle name if not given.")]


def place_of(state: str | None) -> Place | None:
    """Parse `--state` into a directory or database; raises typer.BadParameter."""
    try:
        return None if state is None else read_place(state)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--state") from None
