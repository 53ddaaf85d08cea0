"""The pins of the images are not older than pyproject.toml: `docker/lock.sh` makes them anew."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.docker.tools import DOCKER

PROJECT = tomllib.loads((DOCKER.parent / "pyproject.toml").read_text())
EXTRAS = {
    "serving": ("serve", "index", "remote", "milvus", "kafka"),
    "serving-gpu": ("serve", "gpu", "remote", "milvus", "kafka"),
    "trainer": ("train", "index", "remote", "milvus"),
}
NOT_SERVED = {"serving-gpu": {"jax", "xgboost"}}  # xgboost is for other platforms than that image


def declared(image: str) -> dict[str, Requirement]:
    project = PROJECT["project"]
    requirements, extras = [*map(Requirement, project["dependencies"])], [*EXTRAS[image]]
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == "longtail":
                extras += requirement.extras
            else:
                requirements.append(requirement)
    by_name = {canonicalize_name(requirement.name): requirement for requirement in requirements}
    return {name: by_name[name] for name in by_name.keys() - NOT_SERVED.get(image, set())}


def pins(image: str) -> list[tuple[Requirement, list[str], bool]]:
    """Each pin, its hashes, and whether pyproject.toml asks for it itself."""
    text = (DOCKER / f"requirements-{image}.txt").read_text()
    blocks = []
    for block in re.split(r"(?m)^(?=[a-z0-9])", text)[1:]:
        line = block.splitlines()[0].rstrip(" \\")
        blocks.append((Requirement(line), re.findall(r"--hash=sha256:[0-9a-f]{64}", block), "pyproject.toml" in block))
    return blocks


@pytest.mark.parametrize("image", EXTRAS)
def test_pins_match_pyproject(image: str) -> None:
    requirements = declared(image)
    direct = {canonicalize_name(pin.name) for pin, _, is_direct in pins(image) if is_direct}
    assert direct == set(requirements), "run docker/lock.sh"
    for pin, _, is_direct in pins(image):
        if is_direct:
            (exact,) = pin.specifier
            assert exact.operator == "=="
            assert requirements[canonicalize_name(pin.name)].specifier.contains(Version(exact.version)), (
                "run docker/lock.sh"
            )


@pytest.mark.parametrize("image", [*EXTRAS, "build"])
def test_every_pin_is_exact_and_hashed(image: str) -> None:
    assert len(pins(image)) >= 1
    for pin, hashes, _ in pins(image):
        assert [specifier.operator for specifier in pin.specifier] == ["=="], pin
        assert hashes, pin


@pytest.mark.parametrize("image", [*EXTRAS, "build"])
def test_pins_name_no_index_and_no_path(image: str) -> None:
    text = (DOCKER / f"requirements-{image}.txt").read_text()
    assert not re.search(r"://|(?m:^--)|[ =]/", text)


def test_build_tool_matches_pyproject() -> None:
    (requirement,) = map(Requirement, PROJECT["build-system"]["requires"])
    ((pin, _, _),) = pins("build")
    (exact,) = pin.specifier
    assert pin.name == requirement.name
    assert requirement.specifier.contains(Version(exact.version)), "run docker/lock.sh"


@pytest.mark.parametrize("image", ["serving", "serving-gpu"])
def test_service_has_no_training_framework(image: str) -> None:
    names = {canonicalize_name(pin.name) for pin, _, _ in pins(image)}
    assert not names & {"tensorflow", "tensorflow-cpu", "keras", "jax", "jaxlib", "torch", "matplotlib"}


@pytest.mark.parametrize("unaudited", [None, "serving-gpu"])
def test_audit_fails_when_a_pin_cannot_be_audited(tmp_path: Path, unaudited: str | None) -> None:
    (audit := tmp_path / "bin/pip-audit").parent.mkdir()
    # pip-audit fails for what it could not look up only if it is strict.
    audit.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/said\n'
        f'case "$*" in *--strict*requirements-{unaudited}.txt) exit 1 ;; esac\n'
    )
    audit.chmod(0o700)
    (tmp_path / ".installed").touch()
    result = subprocess.run(
        ["make", "audit", f"TOOLS_VENV={tmp_path}"], cwd=DOCKER.parent, capture_output=True, check=False
    )
    audited = re.findall(r"--strict .*requirements-(.+)\.txt", (tmp_path / "said").read_text())
    assert (result.returncode == 0, audited) == (
        (False, ["serving", "serving-gpu"]) if unaudited else (True, ["serving", "serving-gpu", "trainer"])
    )
