"""Ids of requests are unique: over threads, over workers that were forked at the same moment, over restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from longtail.serving.http.middleware import new_id

MADE = 2000


def made(count: int = MADE) -> list[str]:
    return [new_id() for _ in range(count)]


def of_a_fork() -> list[str]:
    """Ids that a fork of this process makes."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(theirs, "w") as out:
            out.write("\n".join(made()))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as content:
        ids = content.read().split()
    assert os.waitpid(child, 0)[1] == 0
    return ids


# Python 3.12 warns of every fork while there are threads; what the child does needs none of them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.process
def test_no_id_is_made_twice() -> None:
    program = f"from longtail.serving.http.middleware import new_id; print(*[new_id() for _ in range({MADE})])"
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, check=True) for _ in range(2)]
    ids = [id_ for run in runs for id_ in run.stdout.decode().split()]
    for _ in range(4):
        ids += of_a_fork()
        ids += made(1)
    with ThreadPoolExecutor(8) as threads:
        for of_thread in threads.map(made, [MADE] * 8):
            ids += of_thread
    assert len(ids) == len(set(ids)) == 14 * MADE + 4


def test_an_id_is_32_hex_digits() -> None:
    for id_ in made():
        assert len(id_) == 32
        assert set(id_) <= set("0123456789abcdef")
