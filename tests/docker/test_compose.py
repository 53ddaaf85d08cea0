"""The stack: hardened, reachable from this host only, its keys in files, and wired to itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from longtail.serving.settings import READ_ELSEWHERE, Settings
from tests.docker.tools import DOCKER, run

COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REPLICAS: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.replicas.yaml").read_text())["services"]


@pytest.mark.parametrize("name", [*SERVICES, *(f"replicas {name}" for name in REPLICAS)])
def test_service_is_hardened_and_pinned(name: str) -> None:
    single = name in SERVICES
    service = SERVICES[name] if single else REPLICAS[name.removeprefix("replicas ")]
    assert service["read_only"] is (name != "replicas milvus")  # which writes beside its volume
    assert service["cap_drop"] == ["ALL"]
    assert {"healthcheck", "pids_limit", "mem_limit"} <= service.keys()
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    digest = "" if "build" in service else "@sha256:[0-9a-f]{64}"
    version = r"v?\d+\.\d+\.\d+" if single else r"[\w.-]+"
    assert re.fullmatch(rf"[a-z./-]+:{version}{digest}", service["image"])
    if single:
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not service.keys() & {"privileged", "network_mode", "pid", "cap_add", "user"}


def test_settings_of_the_service_exist() -> None:
    names = {f"LONGTAIL_{field.upper()}" for field in Settings.model_fields.keys() | READ_ELSEWHERE}
    assert set(SERVICES["serving"]["environment"]) <= names
    assert {name for name in REPLICAS["serving-a"]["environment"] if name.startswith("LONGTAIL_")} <= names


def test_replicas_have_separate_state() -> None:
    assert len({REPLICAS[f"serving-{name}"]["volumes"][0] for name in "ab"}) == 2
    balancer = (DOCKER / "nginx.conf").read_text()
    # `resolve` needs shared memory, a resolver, and nginx 1.27.3.
    assert all(f"server serving-{name}:8000 resolve " in balancer for name in "ab")
    assert re.search(r"resolver 127\.0\.0\.11 .*upstream replicas \{\s+zone ", balancer, re.DOTALL)
    version = re.match(r"nginx:([\d.]+)", REPLICAS["balancer"]["image"])
    assert version is not None
    assert Version(version[1]) >= Version("1.27.3")


@pytest.mark.parametrize("name", SERVICES)
def test_environment_holds_no_secret(name: str) -> None:
    for variable, value in SERVICES[name].get("environment", {}).items():
        if re.search("KEY|PASSWORD|SECRET|TOKEN", variable):
            assert variable.endswith("FILE")
            secret = value.removeprefix("/run/secrets/")
            assert secret in SERVICES[name]["secrets"]


def test_prometheus_scrapes_the_service_with_its_key() -> None:
    config = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["serving:8000"]}]
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in SERVICES["prometheus"]["secrets"]
    assert SERVICES["serving"]["ports"] == ["127.0.0.1:8000:8000"]


def test_grafana_reads_that_prometheus_and_finds_its_dashboards() -> None:
    provisioning = DOCKER / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/longtail.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in SERVICES["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (DOCKER / "grafana/dashboards" / home.name).is_file()
    for path in (DOCKER / "grafana/dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}


def test_secrets_are_created_once_and_private(tmp_path: Path) -> None:
    script = tmp_path / "secrets.sh"
    script.write_text((DOCKER / "secrets.sh").read_text())
    subprocess.run(["bash", str(script)], check=True, capture_output=True)
    secrets = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert {secret["file"] for secret in COMPOSE["secrets"].values()} <= {f"./secrets/{name}" for name in secrets}
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {0o644}
    keys = [secrets[name] for name in ("client_key", "metrics_key", "admin_keys", "grafana_password")]
    assert len(set(keys)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert secrets["api_keys"].split() == [secrets["client_key"], secrets["metrics_key"]]
    subprocess.run(["bash", str(script)], check=True, capture_output=True)
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == secrets


def test_compose_reads_the_replicas() -> None:
    run("docker-compose", "--file", "compose.replicas.yaml", "config", "--quiet")


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")])
def test_compose_reads_it(files: tuple[str, ...], tmp_path: Path) -> None:
    arguments = [word for file in files for word in ("--file", file)]
    environment = {**os.environ, "LONGTAIL_RELEASES": str(tmp_path)}
    config = json.loads(run("docker-compose", *arguments, "config", "--format", "json", env=environment))
    assert set(config["services"]) == {"serving", "prometheus", "grafana"}
    dockerfile = "docker/serving-gpu.Dockerfile" if len(files) == 2 else "docker/serving.Dockerfile"
    assert config["services"]["serving"]["build"]["dockerfile"] == dockerfile


def test_yamllint() -> None:
    run("yamllint", "--strict", "--config-file", "yamllint.yaml", ".")
