"""`longtail-serve experiments`: the arms of the experiment that runs, as a table, from the files alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longtail.bundle import BUCKET_NAMES
from longtail.index import Releases
from longtail.serving.core.experiments import FILE, ExperimentsError, parse_experiments
from longtail.serving.errors import StateError
from longtail.serving.monitoring import Design, experiments_json, feedback_of
from longtail.state import Place, StoreError

_COLUMNS = ("arm", "share", "units", "answers", "left out", *BUCKET_NAMES, "hits/answer", "recall@k", "difference", "")


def compare(releases: str | Path, state: Place) -> dict[str, Any]:
    """The report of GET /v1/experiments from the files of a service that runs or ran; without coverage, which the
    service counts.

    Args:
        releases: directory or URL of releases, with experiments.toml.
        state: the service's.

    Raises:
        ExperimentsError: the file cannot be used, or is not there.
        StateError: the figures cannot be read.
    """
    path = Releases(releases).beside(FILE)
    try:
        experiments = parse_experiments(path.read_bytes())
    except OSError as error:
        raise ExperimentsError(f"{path}: expected a file of experiments, found none: {error.strerror}") from None
    except ExperimentsError as error:
        raise ExperimentsError(f"{path}: {error.message}") from None
    running = experiments.running
    design = Design(None if running is None else running.design({}), experiments.others)
    if running is None:
        return experiments_json(design, {})
    try:
        with feedback_of(state) as reader:
            return experiments_json(design, reader.arms(running.run))
    except StoreError as error:
        raise StateError(f"{state}: expected the state of a service, found: {error}") from error


def table(report: dict[str, Any]) -> Iterator[str]:
    """A report for people, line by line."""
    experiment = report["experiment"]
    if experiment is None:
        yield f"no experiment runs; in the file: {', '.join(report['others']) or 'none'}"
        return
    since = experiment["since"] or "no answer yet"
    yield f"{experiment['name']}, run {experiment['run']}, since {since}, traffic {experiment['traffic']:g}"
    rows = [_COLUMNS, *(_row(arm) for arm in experiment["arms"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    ratio = experiment["sample_ratio"]
    if ratio["mismatch"]:
        found = ", ".join(f"{name} {_share(share)}" for name, share in ratio["found"].items())
        yield (
            f"sample ratio: units are not divided by the shares ({found}; evidence {ratio['evidence']:.3g}): "
            "do not trust the comparison before you know why"
        )
    else:
        yield f"sample ratio: as the shares say (evidence {ratio['evidence']:.3g}, an alarm from 1000 on)"
    yield f"in brackets: bounds that hold at every look, all looks together with {experiment['confidence']:.0%}"


def _row(arm: dict[str, Any]) -> tuple[str, ...]:
    difference = arm["difference"]
    verdict = "" if difference is None else "real" if difference["real"] else "not yet"
    return (
        arm["name"],
        f"{arm['share']:g}",
        str(arm["units"]),
        str(arm["answers"]),
        str(sum(arm["left_out"].values())),
        *(_share(arm["exposures"][bucket]["share"]) for bucket in BUCKET_NAMES),
        _interval(arm["hits_per_answer"]),
        _interval(arm["recall"]["all"]),
        "" if difference is None else _interval(difference, sign="+"),
        verdict,
    )


def _share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _interval(figure: dict[str, Any], sign: str = "") -> str:
    if figure["value"] is None:
        return "–"
    value, low, high = (format(figure[name], f"{sign}.4f") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
