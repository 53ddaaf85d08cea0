from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from longtail.serving.monitoring.ring import Layout, Ring, by_period, total, worker_arrays

LAYOUT = Layout("counts", 3, 2, "float64", 60)


def test_periods_take_each_others_place(tmp_path: Path) -> None:
    ring = Ring(tmp_path, LAYOUT, 0)
    for period, count in ((10, 1.0), (11, 2.0), (12, 4.0), (13, 8.0)):
        ring.counts_at(period)[:] += count
    assert total([ring.array], LAYOUT, 13 * 60, 3, since=0).tolist() == [14, 14]
    assert total([ring.array], LAYOUT, 13 * 60, 1, since=0).tolist() == [8, 8]
    assert total([ring.array], LAYOUT, 13 * 60, 3, since=12 * 60).tolist() == [12, 12]
    assert by_period([ring.array], LAYOUT, 14 * 60 + 59)[:, 0].tolist() == [4, 8, 0]


def test_readers_see_what_is_added_at_once(tmp_path: Path) -> None:
    ring = Ring(tmp_path, LAYOUT, 7)
    (seen,) = worker_arrays(tmp_path, LAYOUT)
    ring.counts_at(5)[1] += 3
    assert seen[5 % 3].tolist() == [5, 0, 3]


@pytest.mark.parametrize("damage", ["short", "long", "version", "columns", "no ring at all"])
def test_another_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    path = tmp_path / "counts.0.ring"
    if damage == "columns":
        Ring(tmp_path, Layout("counts", 3, 5, "float64", 60), 0)
    else:
        Ring(tmp_path, LAYOUT, 0).counts_at(5)[0] = 1
        content = path.read_bytes()
        path.write_bytes(
            {
                "short": content[:-1],
                "long": content + b"\0",
                "version": content.replace(b'"version": 1', b'"version": 2', 1),
                "no ring at all": b"",
            }[damage]
        )
    before = path.read_bytes()
    assert list(worker_arrays(tmp_path, LAYOUT)) == []
    with caplog.at_level(logging.WARNING):
        ring = Ring(tmp_path, LAYOUT, 0)
    assert "put aside" in caplog.text
    assert not ring.array.any()
    assert (tmp_path / "counts.0.ring.aside").read_bytes() == before
    assert len(list(worker_arrays(tmp_path, LAYOUT))) == 1


def test_a_full_disk_leaves_the_ring_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level(logging.WARNING):
        ring = Ring(tmp_path, LAYOUT, 0)
    ring.counts_at(5)[0] += 1
    assert "memory only" in caplog.text
    assert total(worker_arrays(tmp_path, LAYOUT, ring), LAYOUT, 5 * 60, 1, since=0).tolist() == [1, 0]
    assert list(tmp_path.iterdir()) == []


def test_uint32_counts_add_up_over_rings(tmp_path: Path) -> None:
    layout = Layout("labels", 2, 3, "uint32", 60)
    rings = [Ring(tmp_path, layout, worker) for worker in range(2)]
    for ring in rings:
        np.add.at(ring.counts_at(28_333_333), np.array([0, 2, 2]), np.uint32(1))
    assert total(worker_arrays(tmp_path, layout, rings[0]), layout, 28_333_333 * 60, 2, since=0).tolist() == [2, 0, 4]
