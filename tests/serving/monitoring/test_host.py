"""Gauges of the machine against what the system says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from longtail.serving.monitoring import host
from longtail.serving.monitoring.host import Host


def gauges(state: Path) -> dict[str, float]:
    return {family.name.removeprefix("longtail_"): family.samples[0].value for family in Host(state, 512).collect()}


def test_what_the_system_says(tmp_path: Path) -> None:
    found = gauges(tmp_path)
    assert found["state_disk_bytes"] == shutil.disk_usage(tmp_path).total
    assert 0 < found["state_disk_free_bytes"] < found["state_disk_bytes"]
    assert found["queue_limit"] == 512
    assert found["open_files_limit"] >= 256


@pytest.mark.parametrize(
    ("name", "content", "limited"),
    [
        ("memory.max", "1048576\n", True),
        ("memory.max", "max\n", False),
        ("memory/memory.limit_in_bytes", "1048576", True),
        ("memory/memory.limit_in_bytes", "9223372036854771712", False),
    ],
)
def test_a_container_has_its_own_memory(
    name: str, content: str, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    machine = gauges(tmp_path)["memory_limit_bytes"]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    assert gauges(tmp_path)["memory_limit_bytes"] == (1048576 if limited else machine)
