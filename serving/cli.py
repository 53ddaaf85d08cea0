"""`longtail-serve`: one process that serves what `longtail-index` published."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from serving.server import run
from serving.settings import Settings
from serving.wording import received

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    releases: Annotated[
        Path, typer.Argument(help="Directory that longtail-index publishes to.", exists=True, file_okay=False)
    ],
    host: Annotated[str | None, typer.Option(help="Address to bind [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; 0 lets the system choose [default: 8000].")] = None,
    search_threads: Annotated[
        int | None, typer.Option(help="Requests searched at once, one core each [default: 2].")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve the current release over HTTP, and follow CURRENT.

    Every setting can also be given in the environment, as LONGTAIL_HOST, LONGTAIL_MAX_K and so on.
    """
    given: dict[str, Any] = {"releases": releases, "host": host, "port": port, "search_threads": search_threads}
    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(
            f"expected debug, info, warning or error, received {log_level!r}", param_hint="--log-level"
        )
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise typer.BadParameter(
            f"{first['msg']}, received {received(first['input'])}", param_hint=f"{name} (LONGTAIL_{name.upper()})"
        ) from None
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(settings)


def main() -> None:
    """Entry point of `longtail-serve`."""
    app(prog_name="longtail-serve")
