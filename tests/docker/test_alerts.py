"""Alerts and dashboards ask for series that exist, in PromQL that parses; each alert has its planted case."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.tools import DOCKER, run

PROMETHEUS = DOCKER / "prometheus"
METRICS = DOCKER.parent / "serving/METRICS.md"
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
CASES = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
DASHBOARDS = sorted((DOCKER / "grafana/dashboards").glob("*.json"))
BUILT_IN = {"window": "1h", "instance": ".*", "__rate_interval": "1m"}


def questions(path: Path) -> list[str]:
    """Every PromQL expression of a dashboard, its variables filled in."""
    dashboard = json.loads(path.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    return [re.sub(r"\$(\w+)", lambda match: BUILT_IN[match[1]], expression) for expression in expressions]


def documented() -> set[str]:
    """Series that serving/METRICS.md names; a histogram's three included."""
    names = set(re.findall(r"\blongtail_[a-z_0-9]+", METRICS.read_text()))
    return names | {f"{name}_{suffix}" for name in names for suffix in ("bucket", "count", "sum")}


def asked_for(expressions: list[str]) -> set[str]:
    return set(re.findall(r"\blongtail_[a-z_0-9]+", " ".join(expressions)))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_names_documented_series(path: Path) -> None:
    assert len(questions(path)) >= 20
    assert asked_for(questions(path)) - documented() == set()


def test_alerts_name_documented_series() -> None:
    assert asked_for([rule["expr"] for rule in RULES]) - documented() == set()


def test_the_readme_names_every_alert() -> None:
    named = set(re.findall(r"`(Longtail\w+)`", (DOCKER / "README.md").read_text()))
    assert named == {rule["alert"] for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_has_a_firing_and_a_quiet_case(rule: dict[str, Any]) -> None:
    checks = [(case["name"], check) for case in CASES for check in case["alert_rule_test"]]
    of_rule = [(name, check) for name, check in checks if check["alertname"] == rule["alert"]]
    assert any(check.get("exp_alerts") for _, check in of_rule)
    assert [name for name, check in of_rule if name == "healthy" and not check.get("exp_alerts")] == ["healthy"]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert {"summary", "description"} == rule["annotations"].keys()


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "metrics_key").write_text("k" * 64)
    text = (PROMETHEUS / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/", f"{tmp_path}/"))
    (tmp_path / "rules.yml").write_text((PROMETHEUS / "rules.yml").read_text())
    assert "25 rules" in run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))


def test_alerts_fire_in_their_cases_only() -> None:
    run("promtool", "test", "rules", "rules_test.yml", cwd=PROMETHEUS)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboard_is_promql(path: Path, tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(questions(path))]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules" in run("promtool", "check", "rules", str(tmp_path / "panels.yml"))
