"""The manifests: valid against Kubernetes' schemas, complete, and of settings and series that there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from longtail.index import build, open_releases
from longtail.serving.events.objects import upload_events
from longtail.serving.events.schema import event_json
from longtail.serving.settings import READ_ELSEWHERE, Settings
from longtail.trainer.check import check
from longtail.trainer.config import load_recipe
from tests.bundles import make_bundle
from tests.docker.tools import DOCKER, run
from tests.events import write_events
from tests.s3 import S3Server
from tests.serving.process import children, until

KUSTOMIZATION: dict[str, Any] = yaml.safe_load((DOCKER / "kustomization.yaml").read_text())
RESOURCES = [
    document for path in KUSTOMIZATION["resources"] for document in yaml.safe_load_all((DOCKER / path).read_text())
]


def find_resource(kind: str) -> dict[str, Any]:
    resource: dict[str, Any] = next(document for document in RESOURCES if document["kind"] == kind)
    return resource


def pods() -> list[dict[str, Any]]:
    job = find_resource("CronJob")["spec"]["jobTemplate"]
    return [controller["spec"]["template"]["spec"] for controller in (find_resource("StatefulSet"), job)]


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in (*pod.get("initContainers", []), *pod["containers"])]


def container_named(name: str) -> dict[str, Any]:
    (container,) = (candidate for candidate in containers() if candidate["name"] == name)
    return container


@pytest.mark.parametrize("name", [path for path in KUSTOMIZATION["resources"] if "monitoring" not in path])
def test_schemas(name: str) -> None:
    run("kubernetes-validate", "--strict", name)


def test_every_file_exists_or_is_created_by_secrets_sh() -> None:
    secrets_script = (DOCKER / "secrets.sh").read_text()
    for generated in (*KUSTOMIZATION["configMapGenerator"], *KUSTOMIZATION["secretGenerator"]):
        for path in generated.get("files", []):
            assert (
                (DOCKER / path).is_file()
                or f"$secrets/{Path(path).name}" in secrets_script
                or Path(path).name in secrets_script
            ), path


def test_mounted_secrets_and_config_maps_exist() -> None:
    names = {entry["name"] for entry in (*KUSTOMIZATION["configMapGenerator"], *KUSTOMIZATION["secretGenerator"])}
    for pod in pods():
        sources = [volume[kind] for volume in pod["volumes"] for kind in ("secret", "configMap") if kind in volume]
        assert {source.get("secretName") or source["name"] for source in sources} <= names
    for container in containers():
        assert {source["configMapRef"]["name"] for source in container["envFrom"]} <= names
    (secret,) = KUSTOMIZATION["secretGenerator"]
    keys = {Path(path).name for path in secret["files"]}
    read = {
        entry["value"]
        for container in containers()
        for entry in container.get("env", [])
        if "secrets" in entry.get("value", "")
    }
    assert {Path(path).name for path in read} <= keys
    assert find_resource("ServiceMonitor")["spec"]["endpoints"][0]["authorization"]["credentials"]["key"] in keys


def test_settings_exist() -> None:
    literals = [entry.partition("=")[0] for entry in KUSTOMIZATION["configMapGenerator"][0]["literals"]]
    names = [entry["name"] for container in containers() for entry in container.get("env", [])] + literals
    fields = {f"LONGTAIL_{field.upper()}" for field in Settings.model_fields.keys() | READ_ELSEWHERE}
    assert {name for name in names if name.startswith("LONGTAIL_")} <= fields


def test_pods_are_hardened() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["fsGroup"] == 10001
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "LONGTAIL_PORT is a setting, and would be a Service's"
    for container in containers():
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", ["serving", "feedback", "train", "index"])
def test_working_directories_are_writable_volumes(name: str) -> None:
    container = container_named(name)
    image, _, _ = container["image"].partition(":")
    dockerfile = (DOCKER / f"{image.removeprefix('longtail-')}.Dockerfile").read_text()
    of_image = re.findall(r"(?m)^WORKDIR (.*)$", dockerfile)[-1]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert container.get("workingDir", of_image) in mounts


def test_network_policies_allow_only_service_ports() -> None:
    policies = {
        resource["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]: resource["spec"]
        for resource in RESOURCES
        if resource["kind"] == "NetworkPolicy"
    }
    assert {tuple(policy["policyTypes"]) for policy in policies.values()} == {("Ingress",)}
    templates = (
        find_resource("StatefulSet")["spec"]["template"],
        find_resource("CronJob")["spec"]["jobTemplate"]["spec"]["template"],
    )
    assert {resource["metadata"]["labels"]["app.kubernetes.io/name"] for resource in templates} == policies.keys()
    targets = {
        port["targetPort"]
        for resource in RESOURCES
        if resource["kind"] == "Service"
        for port in resource["spec"]["ports"]
    }
    assert policies["longtail"]["ingress"] == [{"ports": [{"port": target} for target in targets]}]
    assert "ingress" not in policies["longtail-training"]


def test_a_pod_has_time_to_end() -> None:
    pod = pods()[0]
    env = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    drain = float(env["LONGTAIL_DRAIN_SECONDS"] or 0)
    assert pod["terminationGracePeriodSeconds"] > drain + Settings.shutdown_seconds


def test_the_autoscaler_uses_only_cpu() -> None:
    # A metric that cannot be fetched, as of a missing adapter, would keep every replica for good.
    (metric,) = find_resource("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert (metric["type"], metric["resource"]["name"]) == ("Resource", "cpu")


def test_retried_pods_upload_under_different_names() -> None:
    train = container_named("train")
    (pod,) = [variable for variable in train["env"] if variable["name"] == "POD"]
    assert pod["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert '"$BUNDLES/$POD"' in train["args"][0]


RECIPE = DOCKER / "kubernetes/recipe.toml"


def test_the_recipe_is_valid() -> None:
    log = dict(literal.split("=", 1) for literal in KUSTOMIZATION["configMapGenerator"][0]["literals"])["LOG"]
    assert load_recipe(RECIPE, []).data.train == log


def started(name: str, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The script of a container, whose /state and /work are folders below another."""
    (script,) = container_named(name)["args"]
    for mounted in ("/state/", "/work/"):
        script = script.replace(mounted, f"{folder}{mounted}")
        (folder / mounted.strip("/")).mkdir(exist_ok=True, parents=True)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(["sh", "-c", script], env=os.environ | environment | {"PATH": path})


def organic(key: str, features: str = '{"user_id":"u1"}', label: str = "item-1", minutes: float = 31) -> bytes:
    at = time.time() - 60 * minutes
    fields = {"features": features, "labels": [label], "event": "click", "weight": 1, "time": at}
    return event_json(kind="organic", idempotency_key=key, positions=[None], propensities=[1.0], buckets=[0], **fields)


def built(folder: Path) -> None:
    bundle = make_bundle()
    columns = {"query_id": "user_id", "label_id": "product_id"}
    facts = bundle.manifest.training_data | columns
    replace(bundle, manifest=bundle.manifest.model_copy(update={"training_data": facts})).write(folder / "bundle")
    build(folder / "bundle", folder / "releases", name="first", spec="flat")


@pytest.mark.nightly
def test_events_of_every_replica_reach_training(s3: S3Server, tmp_path: Path) -> None:
    environment = {"EVENTS": s3.url(), "RELEASES": str(tmp_path / "releases"), "LOG": "s3://shop/log/", "POD": "p"}

    def exported() -> list[str] | None:
        assert started("feedback", tmp_path, **environment).wait(60) == 0
        file = tmp_path / "work/feedback.parquet"
        return sorted(pq.read_table(file)["idempotency_key"].to_pylist()) if file.exists() else None

    for pod, keys in (("pod-0", ["a", "sent twice"]), ("pod-1", ["b", "sent twice"])):
        sidecar = started("events", tmp_path / pod, **environment)
        until(lambda sidecar=sidecar: children(sidecar.pid), "the sidecar to wait")  # type: ignore[misc]
        # The service ends before its sidecar, and finishes its last file.
        late = organic(f"late of {pod}", minutes=29)
        write_events(tmp_path / pod / "state/local/events", *map(organic, keys), late)
        sidecar.terminate()
        assert sidecar.wait(60) == 0
    assert exported() is None, "no release yet"
    built(tmp_path)
    assert exported() is None, "none published yet"
    open_releases(tmp_path / "releases").publish("first")
    assert exported() == ["a", "b", "sent twice"], "another pod may still have events that are less than 30 minutes old"


@pytest.mark.parametrize("event_count", [0, 60])
def test_accepted_events_do_not_stop_training(
    s3: S3Server, tmp_path: Path, event_count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    built(tmp_path)
    open_releases(tmp_path / "releases").publish("first")
    unknown = [organic(line, line) for line in ('{"history":["3"]}', '{"user_id":""}', '{"user_id":null}')]
    unknown.append(organic("empty label", label=""))
    accepted = [organic(str(n), f'{{"user_id":"u{n}"}}') for n in range(event_count)]
    write_events(tmp_path / "events", *accepted, *unknown)
    environment = {"EVENTS": s3.url(), "RELEASES": str(tmp_path / "releases"), "LOG": str(tmp_path / "log.parquet")}
    upload_events(tmp_path / "events", environment["EVENTS"])
    now, rows = time.time(), range(600)
    columns = {"user_id": [f"u{n % 60}" for n in rows], "product_id": [f"item-{n % 41}" for n in rows]}
    times = pa.array([int(1e6 * (now - 3600 * (700 - n))) for n in rows], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table(columns | {"clicked_at": times}), tmp_path / "log.parquet")

    assert started("feedback", tmp_path, **environment).wait(60) == 0
    assert "left out: 4 labels whose label is empty, or whose query has no user_id" in capfd.readouterr().out
    (tmp_path / "longtail-train").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/arguments\n')
    (tmp_path / "longtail-train").chmod(0o700)
    assert started("train", tmp_path, **environment, BUNDLES="s3://shop/bundles", POD="p").wait(60) == 0
    override = next(line for line in (tmp_path / "arguments").read_text().splitlines() if line.startswith("data.train"))
    report = check(load_recipe(RECIPE, [override]))
    assert report.problems == []
    assert sum(split["pairs"] for split in report.splits.values()) == 600 + event_count


@pytest.mark.parametrize("feedback", [False, True])
def test_training_reads_the_log_and_exported_feedback(tmp_path: Path, feedback: bool) -> None:
    (tmp_path / "longtail-train").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/arguments\n')
    (tmp_path / "longtail-train").chmod(0o700)
    (tmp_path / "work").mkdir()
    expected = ["s3://shop/log/"]
    if feedback:
        expected.append(f"{tmp_path}/work/feedback.parquet")
        Path(expected[1]).touch()
    assert started("train", tmp_path, LOG=expected[0], BUNDLES="s3://shop/bundles", POD="p").wait(60) == 0
    fit, _, option, override, *_, upload, _, target = (tmp_path / "arguments").read_text().splitlines()
    assert (fit, option, upload, target) == ("fit", "--set", "upload", "s3://shop/bundles/p")
    trained = load_recipe(RECIPE, [override]).data.train
    assert list(map(str, trained)) == expected


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """docker/ with secrets of its own, as next to an overlay."""
    copy = tmp_path / "longtail/docker"
    shutil.copytree(DOCKER, copy, ignore=shutil.ignore_patterns("secrets"))
    subprocess.run(["bash", str(copy / "secrets.sh")], check=True, capture_output=True)
    return copy


def rendered(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl apply -k` would apply, by kind and name without the hash of its content."""
    documents = yaml.safe_load_all(run("kubectl", "kustomize", str(folder)))
    return {
        (document["kind"], re.sub(r"-[a-z0-9]{10}$", "", document["metadata"]["name"])): document
        for document in documents
    }


def test_the_base_renders_every_resource(clone: Path) -> None:
    expected = [(resource["kind"], resource["metadata"]["name"]) for resource in RESOURCES]
    expected += [("ConfigMap", resource["name"]) for resource in KUSTOMIZATION["configMapGenerator"]]
    expected += [("Secret", resource["name"]) for resource in KUSTOMIZATION["secretGenerator"]]
    assert sorted(rendered(clone)) == sorted(expected)


def test_the_overlay_of_the_readme_applies(clone: Path) -> None:
    (overlay := clone.parent.parent / "overlay").mkdir()
    (text,) = re.findall(r"(?ms)^```yaml\n(apiVersion: kustomize.*?)^```", (DOCKER / "README.md").read_text())
    (overlay / "kustomization.yaml").write_text(text)
    documents = rendered(overlay)
    assert {document["metadata"]["namespace"] for document in documents.values()} == {"shop"}
    service = documents["StatefulSet", "longtail"]["spec"]
    (container,) = service["template"]["spec"]["containers"]
    assert (service["replicas"], container["resources"]["limits"]["nvidia.com/gpu"]) == (3, "1")
    assert "memory" in container["resources"]["limits"]
    assert container["image"] == "registry.example.com/longtail-serving-gpu:0.1.0"
    scaler = documents["HorizontalPodAutoscaler", "longtail"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 12)
    settings = documents["ConfigMap", "longtail"]
    assert settings["data"]["RELEASES"] == "s3://shop/releases"
    assert "LONGTAIL_DATABASE_URL" in settings["data"]
    # Pods refer to the settings by the name with the hash of what they now are.
    assert {"configMapRef": {"name": settings["metadata"]["name"]}} in container["envFrom"]
    assert documents["CronJob", "longtail-training"]["spec"]["schedule"] == "30 1 * * *"
