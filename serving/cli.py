"""`longtail-serve`: serve the releases that `longtail-index` publishes, and check them beforehand."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from longtail.bundle import BundleError
from longtail.bundle.integrity import MANIFEST
from longtail.bundle.objects import is_url, local_path
from longtail.commands.app import app_of_commands, split_settings
from longtail.index import LongtailIndexError
from longtail.index.release.release import CURRENT, RELEASE_MANIFEST
from longtail.index.release.releases import find_release
from longtail.serving import logs
from longtail.serving.batch import TableOptions, answer
from longtail.serving.campaign import invert
from longtail.serving.check import check_release
from longtail.serving.compare import compare, read_experiment, report_lines
from longtail.serving.errors import InvalidRequestError, ServingError
from longtail.serving.events.objects import download_events, upload_events
from longtail.serving.export import export, minutes_under_way, read_window
from longtail.serving.http.openapi import openapi_document
from longtail.serving.off_policy import off_policy as estimate_off_policy, report_lines as lines_of_off_policy
from longtail.serving.process.server import hold_hangups
from longtail.serving.process.supervisor import serve
from longtail.serving.settings import Settings, explain, no_settings
from longtail.state import StateLocation, StoreError, copy_label_changes, parse_location
from longtail.tables import as_source

logger = logging.getLogger(__name__)
app = app_of_commands("Serve releases over HTTP.")

ReleasesArgument = Annotated[str, typer.Argument(help="Directory or URL of releases.", envvar="LONGTAIL_RELEASES")]
StateOption = Annotated[
    str | None,
    typer.Option(
        envvar=["LONGTAIL_DATABASE_URL", "LONGTAIL_STATE"],
        metavar="STATE",
        help="The service's state, a directory or postgresql://… (default: RELEASES/.state; of a URL none).",
    ),
]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="RELEASES", help="Directory or URL of releases, or the one that answers (CURRENT).",
        envvar="LONGTAIL_RELEASES",
    ),
]  # fmt: skip
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Option of every row, as POST /v1/retrieve (or /v1/queries) takes it: k=50."
    ),
]


@dataclass(frozen=True)
class RecordedEvents:
    """Events of a service, and the part of them to read."""

    events: Annotated[
        str | None,
        typer.Option(
            envvar="LONGTAIL_EVENTS", metavar="EVENTS",
            help="Folder of events, or the URL that upload-events fills (default: RELEASES/.state/events).",
        ),
    ] = None  # fmt: skip
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Earliest event: ISO 8601, or an age such as 7d, 12h, 30m.")
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN",
            help="End of the window, exclusive, in the same forms (default: a minute ago; of a URL 30 minutes, as "
            "events are uploaded late).",
        ),
    ] = None

    def folder(self, releases: str, state: str | None = None) -> Path:
        """Return the folder of events, by default that of a state, or the releases' own."""
        # The URL may hold a password, so it is not shown.
        if self.events is not None and self.events.startswith("kafka:"):
            raise typer.BadParameter(
                "expected the folder that a connector writes, received a topic of Kafka", param_hint="--events"
            )
        if self.events is not None:
            return download_events(self.events) if is_url(self.events) else local_path(self.events)
        location = _read_state(state or os.environ.get("LONGTAIL_DATABASE_URL") or os.environ.get("LONGTAIL_STATE"))
        if isinstance(location, Path):
            return location / "events"
        if location is not None or is_url(releases):
            raise typer.BadParameter("expected --events, the folder of events, received none", param_hint="--events")
        return local_path(releases) / ".state" / "events"

    def window(self) -> tuple[float, float]:
        """Return the span of events to read, in seconds since 1970."""
        return read_window(self.since, self.until, time(), self.events)


@dataclass(frozen=True)
class ColumnOptions:
    """Columns of a table of queries that are no features."""

    exclude: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Lists of labels that are not to be answered.")
    ] = None
    history: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Lists of labels that the query chose, the latest last.")
    ] = None


@dataclass(frozen=True)
class LabelOptions:
    """Which labels are answered: those of a time, with the changes of a state."""

    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="Answer labels available then, UTC (default: when it begins).")
    ] = None
    state: StateOption = None


@app.command(epilog="Example: longtail-serve run releases --port 8000")
def run(
    releases: Annotated[
        str,
        typer.Argument(help="Directory that longtail-index publishes to, or its URL, such as s3://bucket/releases."),
    ],
    host: Annotated[str | None, typer.Option(help="Address to bind (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 lets the system choose (default: 8000).")] = None,
    state: Annotated[
        Path | None, typer.Option(help="Directory of added labels, feedback and figures (default: RELEASES/.state).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the port (default: 1).")] = None,
    refresh: Annotated[
        str | None, typer.Option(metavar="SPAN", help="Refresh forecast and co-occurrence so often, such as 1h.")
    ] = None,
) -> None:
    """Serve the current release, and follow CURRENT.

    Every setting can also be given in the environment, as LONGTAIL_HOST, LONGTAIL_MAX_K and so on, or in a TOML file
    that LONGTAIL_SETTINGS_FILE names, as host, max_k; API keys only there (LONGTAIL_API_KEYS, LONGTAIL_ADMIN_KEYS), or
    in files of their own (LONGTAIL_API_KEYS_FILE, LONGTAIL_ADMIN_KEYS_FILE). SIGTERM stops without
    dropping a request; SIGHUP reads the files of keys again.
    """
    settings = _settings(
        releases=releases,
        host=host,
        port=port,
        state=state,
        workers=workers,
        refresh=refresh,
    )
    if isinstance(settings.releases, Path) and not settings.releases.is_dir():
        raise typer.BadParameter(
            f"expected a directory that longtail-index publishes to, found none at {settings.releases}",
            param_hint="RELEASES",
        )
    if isinstance(settings.releases, Path):
        for manifest, what in ((RELEASE_MANIFEST, "one release"), (MANIFEST, "a bundle")):
            if (settings.releases / manifest).is_file():
                raise typer.BadParameter(
                    f"expected a directory that longtail-index publishes to, found {what} at {settings.releases}",
                    param_hint="RELEASES",
                )
    logs.configure(settings.log_level)
    if settings.insecure and not any(settings.read_keys()):
        logger.warning("insecure: no keys, so whoever reaches %s may ask, change labels and reload", settings.host)
    if isinstance(settings.releases, Path) and not (settings.releases / CURRENT).exists():
        logger.warning("%s: no release is published here yet; see longtail-index publish", settings.releases)
    if unknown := no_settings(os.environ):
        logger.warning("%s: no setting of this service, and not read", ", ".join(unknown))
    hold_hangups()
    serve(settings)


@app.command(epilog="Example: longtail-serve check releases/shop-2")
def check(
    release: Annotated[Path, typer.Argument(help="A release's directory.", exists=True, file_okay=False)],
) -> None:
    """Verify a release and answer queries from it. The report says how much time and memory that takes."""
    for line in check_release(release):
        print(line)


@app.command(epilog="Example: longtail-serve copy-labels old-state --state postgresql://db/longtail")
def copy_labels(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A state directory, or postgresql://….")],
    *,
    state: Annotated[
        str,
        typer.Option(
            envvar=["LONGTAIL_DATABASE_URL", "LONGTAIL_STATE"],
            metavar="STATE",
            help="Where they are to be; it has none yet.",
        ),
    ],
) -> None:
    """Copy label changes to another state, such as a database."""
    location = _read_state(state)
    assert location is not None
    print(f"{copy_label_changes(source, location):,} label changes copied to {location}")


@app.command(epilog="Example: longtail-serve export-feedback releases --out feedback.parquet")
def export_feedback(
    releases: ReleasesArgument,
    *,
    out: Annotated[Path, typer.Option(help="The Parquet file; one that is there is replaced in one step.")],
    all_: Annotated[
        bool, typer.Option("--all", help="Also choices that training refuses: without features or query id.")
    ] = False,
    recorded: RecordedEvents,
) -> None:
    """Write the service's feedback as training data. The service may run meanwhile."""
    folder, window = recorded.folder(releases), recorded.window()
    for line in export(releases, folder, out, window=window, everything=all_):
        print(line)


@app.command("upload-events", epilog="Example: longtail-serve upload-events .state/events s3://bucket/events")
def upload_finished_events(
    events: Annotated[Path, typer.Argument(help="Folder of events; its service may run meanwhile.")],
    url: Annotated[str, typer.Argument(help="URL that gets them; several services may share it.")],
) -> None:
    """Copy finished files of events to an object store."""
    if not events.is_dir():  # a sidecar may be earlier than its service, which makes the folder
        print(
            f"longtail-serve: {events}: expected a folder of events, found none (yet): nothing is uploaded",
            file=sys.stderr,
        )
    print(f"uploaded: {upload_events(events, url):,} files")


@app.command(epilog="Example: longtail-serve experiments releases --since 7d")
def experiments(
    releases: ReleasesArgument,
    *,
    recorded: RecordedEvents,
    json_: Annotated[bool, typer.Option("--json", help="The comparison as JSON.")] = False,
) -> None:
    """Compare the arms of the running experiment.

    RELEASES/experiments.toml names the arms. The service may run meanwhile.
    """
    experiment = read_experiment(releases)
    if experiment is None:
        print("no experiment runs")
        return
    report = compare(experiment, recorded.folder(releases), recorded.window())
    for line in [json.dumps(report, ensure_ascii=False)] if json_ else report_lines(report):
        print(line)
    if recorded.until is None and not json_:
        minutes = minutes_under_way(recorded.events)
        last = "minute" if minutes == 1 else f"{minutes} minutes"
        print(f"left out: the last {last}, whose events may be under way (--until 0m takes all)")


@app.command(epilog="Example: longtail-serve off-policy releases --at 0.5 --out report.html")
def off_policy(
    releases: SourceArgument,
    *,
    at: Annotated[
        list[float] | None, typer.Option(metavar="λ", help="Other λ (default: those of the offline curve, or tenths).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also the report as JSON, .json, or as a page, .html, which needs matplotlib."
        ),
    ] = None,
    event: Annotated[str | None, typer.Option(metavar="NAME", help="Count these choices alone: purchase, …")] = None,
    unit: Annotated[
        str | None, typer.Option(metavar="FEATURE", help="Query feature that names the user (default: all features).")
    ] = None,
    recorded: RecordedEvents,
    state: StateOption = None,
) -> None:
    """Estimate what other λ would bring, off-policy.

    The evidence is answers that explored; the report says where the evidence is too thin.
    """
    if out is not None and out.suffix not in (".html", ".json"):
        raise typer.BadParameter(f"expected a file that ends in .html or .json, received {out}", param_hint="--out")
    if out is not None and out.suffix == ".html" and find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "expected matplotlib, which draws the page: pip install matplotlib", param_hint="--out"
        )
    root, release = find_release(releases)
    report = estimate_off_policy(
        root, recorded.folder(root, state), recorded.window(), at or (),
        release=release, state=_read_state(state), event=event, unit=unit,
    )  # fmt: skip
    if out is not None and out.suffix == ".json":
        out.write_text(json.dumps(report, ensure_ascii=False), encoding="utf-8")
    elif out is not None:
        from longtail.serving.off_policy_page import html_report  # the service does without matplotlib

        out.write_bytes(html_report(report))
    for line in lines_of_off_policy(report):
        print(line)


@app.command(epilog="Example: longtail-serve batch releases users.parquet --out answers --set k=50")
def batch(
    releases: SourceArgument,
    queries: Annotated[str, typer.Argument(help="Table of queries: a file, directory, glob or URL.")],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the answers; created if missing.")],
    set_: SetOption = None,
    columns: ColumnOptions,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Answer the I-th of N shares of the rows, from 0, also of one file.")
    ] = "0/1",
    labels: LabelOptions,
) -> None:
    """Answer a table of queries offline, into Parquet files. Run again to resume."""
    share, _, shares = shard.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and int(share) < int(shares)):
        raise typer.BadParameter(f"expected I/N with 0 <= I < N, received {shard}", param_hint="--shard")
    table_options = TableOptions(_read_options(set_), columns.exclude, history=columns.history, at=labels.at)
    root, release = find_release(releases)
    answer(
        root, as_source(queries), out, table_options, release=release, state=_read_state(labels.state),
        share=(int(share), int(shares)), say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    print(out)


@app.command(
    "invert",
    epilog="Example: longtail-serve invert releases products.csv --out campaign.csv",
)
def invert_table(
    releases: SourceArgument,
    labels: Annotated[str, typer.Argument(help="Table of labels: a file, directory, glob or URL.")],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="New file: .parquet, .csv or .jsonl.")],
    set_: SetOption = None,
    max_per_query: Annotated[int | None, typer.Option(min=1, help="Most labels that one query gets.")] = None,
    state: StateOption = None,
) -> None:
    """Write the best known queries of each label of a table."""
    root, release = find_release(releases)
    rows = invert(
        root, as_source(labels), out, _read_options(set_), max_per_query=max_per_query, release=release,
        state=_read_state(state),
    )  # fmt: skip
    print(f"{out}: {rows:,} rows")


@app.command(epilog="Example: longtail-serve openapi > openapi.json")
def openapi() -> None:
    """Print the OpenAPI document of the service."""
    print(json.dumps(openapi_document(), indent=1, ensure_ascii=False))


def main(arguments: list[str] | None = None) -> None:
    """Run `longtail-serve`; the operator's errors end in one line and exit code 2."""
    try:
        app(arguments, prog_name="longtail-serve")
    except (ServingError, LongtailIndexError, BundleError, StoreError, OSError) as error:
        print(f"longtail-serve: {error}", file=sys.stderr)
        sys.exit(2)


def _settings(**shared_options: Any) -> Settings:
    try:
        return Settings(**{name: value for name, value in shared_options.items() if value is not None})
    except ValidationError as error:
        name, wrong = explain(error)
    except ValueError as error:  # the message names the file or variable
        name, wrong = None, str(error)
    raise typer.BadParameter(wrong, param_hint=name and f"{name} (LONGTAIL_{name.upper()})")


def _read_options(settings: list[str] | None) -> dict[str, Any]:
    """Parse `--set KEY=VALUE`; a value is JSON, or else text. Raises InvalidRequestError."""
    options: dict[str, Any] = {}
    for key, value in split_settings(settings, InvalidRequestError).items():
        try:
            options[key] = json.loads(value)
        except ValueError as error:
            if value.lstrip().startswith(("{", "[", '"')):
                raise InvalidRequestError(f"--set {key}: expected JSON, received {value!r}: {error}") from error
            options[key] = value
    return options


def _read_state(state: str | None) -> StateLocation | None:
    """Parse `--state` into a directory or database; raises typer.BadParameter."""
    try:
        return None if state is None else parse_location(state)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--state") from None
