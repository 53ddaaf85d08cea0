"""Planted drift through real servers: what an operator sees of it, and what a restart leaves.

The release's default λ is 0. Users and calibration queries are random vectors alike: traffic at any λ has no drift, and
a client that excludes all labels but the head's has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longtail.bundle import BiasRemoval
from longtail.client import Answer, Client, Query
from tests.bundles import make_bundle
from tests.docker.tools import DOCKER, run
from tests.end_to_end.killing import server
from tests.end_to_end.releases import publish_bundle
from tests.serving.process import ServerProcess

LABELS, USERS, K = 300, 200, 20
QUIET, LOUD, PREVIEWED = 100, 900, 40
DRIFT_ALERTS = {"LongtailTailShareCollapsed", "LongtailExposureDrift", "LongtailScoreDrift"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True)
class Look:
    """What one worker says at one time: GET /v1/monitoring, and /metrics by name and labels."""

    report: dict[str, Any]
    samples: Samples

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drift")
    bundle = make_bundle(labels=LABELS, dim=32, users=USERS)
    manifest = bundle.manifest.model_copy(update={"bias_removal": BiasRemoval(default=0.0)})
    return publish_bundle(replace(bundle, manifest=manifest), root, "first")


def started(releases: Path, state: Path) -> Any:
    state.mkdir(exist_ok=True)
    return server(releases, state / "server.log", state=state, drain_seconds=0)


def features(user: int) -> dict[str, Any]:
    return {"user_id": f"u{user % USERS}"}


def ask(
    longtail: Client,
    count: int,
    *,
    bias_removal: float | None = None,
    exclude: Sequence[str] = (),
    preview: bool = False,
) -> list[Answer]:
    """So many queries, fifty in a request."""
    queries = [Query(features(user), k=K, bias_removal=bias_removal, exclude=list(exclude)) for user in range(count)]
    return [longtail.retrieve(queries[at : at + 50], preview=preview) for at in range(0, count, 50)]


def beyond_the_head() -> list[str]:
    bundle = make_bundle(labels=LABELS, dim=32, users=USERS)
    return [f"item-{row}" for row in np.flatnonzero(bundle.labels.buckets != 0).tolist()]


def look(process: ServerProcess, longtail: Client, queries: int) -> Look:
    deadline = time.monotonic() + 15
    while (report := longtail.monitoring())["windows"]["1h"]["queries"] < queries:  # it is up to a second old
        assert time.monotonic() < deadline, report["windows"]
        time.sleep(0.1)
    families = text_string_to_metric_families(httpx.get(f"{process.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return Look(report, {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples})


@pytest.fixture(scope="module")
def looks(releases: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Look]:
    """One service's story: quiet, previewed, drifted, after SIGTERM, after SIGKILL."""
    state, looks_by_name = tmp_path_factory.mktemp("looks") / "state", {}
    with started(releases, state) as process, Client(process.url) as longtail:
        process.wait_until_ready()
        ask(longtail, QUIET // 2, bias_removal=0.0)
        ask(longtail, QUIET // 2, bias_removal=1.0)
        looks_by_name["quiet"] = look(process, longtail, QUIET)
        ask(longtail, PREVIEWED, bias_removal=1.0, preview=True)
        longtail.similar("item-1", preview=True)
        ask(longtail, 1, bias_removal=0.0)
        looks_by_name["previewed"] = look(process, longtail, QUIET + 1)
        ask(longtail, LOUD, exclude=beyond_the_head())
        looks_by_name["drifted"] = look(process, longtail, QUIET + 1 + LOUD)
        assert process.terminate() == 0
    for after in ("terminated", "killed"):
        with started(releases, state) as process, Client(process.url) as longtail:
            process.wait_until_ready()
            looks_by_name[after] = look(process, longtail, QUIET + 1 + LOUD)
            process.process.kill()
            process.process.wait()
    return looks_by_name


def test_verdict_names_drift_and_cause(looks: dict[str, Look]) -> None:
    def drifted(when: str, *severities: str) -> set[tuple[str, str | None]]:
        return {
            (finding["signal"], finding["bucket"])
            for finding in looks[when].report["verdict"]["findings"]
            if finding["severity"] in severities
        }

    for when in ("quiet", "previewed"):
        assert not {signal for signal, _ in drifted(when, "watch", "act")} & {"share_drift", "score_drift"}
    for when in ("drifted", "killed"):
        verdict = looks[when].report["verdict"]
        acts = drifted(when, "act")
        assert verdict["severity"] == "act"
        assert acts >= {("share_drift", "head"), ("share_drift", "tail"), ("score_drift", None)}
        assert verdict["headline"].startswith("Tail gets ")
        assert looks[when]("longtail_verdict", signal="share_drift") == 2


@pytest.mark.parametrize(("when", "fire"), [("quiet", set()), ("previewed", set()), ("drifted", DRIFT_ALERTS)])
def test_alert_rules_fire_on_scraped_series(looks: dict[str, Look], tmp_path: Path, when: str, fire: set[str]) -> None:
    """Gauges as they were scraped, for two hours, and counters that rise by what was scraped in each."""
    series = [{"series": 'up{job="longtail",instance="s"}', "values": "1x120"}]
    for (name, labels), value in looks[when].samples.items():
        if name.startswith("longtail_"):
            written = ",".join(f'{key}="{text}"' for key, text in [("job", "longtail"), ("instance", "s"), *labels])
            counts = name.endswith(("_total", "_bucket", "_count", "_sum"))
            values = f"0+{value / 60:.9f}x120" if counts else f"{value:.9f}x120"
            series.append({"series": f"{name}{{{written}}}", "values": values if value == value else "NaN " * 121})
    expression = (
        'count by (alertname) (ALERTS{alertstate="firing",alertname=~"Longtail(Tail|Exposure|Score|Online).*"})'
    )
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(fire)]
    case = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": expression, "eval_time": "90m", "exp_samples": expected}],
    }
    rules = {"rule_files": [str(DOCKER / "prometheus/rules.yml")], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yml").write_text(json.dumps(rules))
    run("promtool", "test", "rules", str(tmp_path / "test.yml"))


@pytest.mark.parametrize("after", ["terminated", "killed"])
def test_figures_survive_restarts(looks: dict[str, Look], after: str) -> None:
    before, now = looks["drifted"].report, looks[after].report
    for window in ("1h", "24h"):
        for name in ("queries", "bias_removal", "exposures", "coverage", "popularity", "judged", "psi"):
            assert now["windows"][window][name] == before["windows"][window][name], name
    for name in ("at", "queries", "share", "psi", "bias_removal", "release"):
        assert now["series"][name] == before["series"][name], name
    for name in ("release", "since", "baseline"):
        assert now[name] == before[name], name
