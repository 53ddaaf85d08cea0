"""Ids of requests are unique: over threads, and over workers that were forked at the same moment."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from longtail.serving.http.middleware import random_bits


def create_ids(count: int = 2000) -> list[str]:
    return [f"{random_bits(128):032x}" for _ in range(count)]


def create_ids_in_fork() -> list[str]:
    """Ids that a fork of this process makes."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(theirs, "w") as out:
            out.write("\n".join(create_ids()))
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as content:
        ids = content.read().split()
    assert os.waitpid(child, 0)[1] == 0
    return ids


# Python 3.12 warns of every fork while there are threads; what the child does needs none of them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.process
def test_request_ids_are_unique() -> None:
    ids = [id_ for _ in range(4) for id_ in (*create_ids_in_fork(), *create_ids(1))]
    with ThreadPoolExecutor(8) as threads:
        ids += [id_ for of_thread in threads.map(create_ids, [2000] * 8) for id_ in of_thread]
    assert len(ids) == len(set(ids)) == 12 * 2000 + 4
    assert all(len(id_) == 32 and set(id_) <= set("0123456789abcdef") for id_ in ids)
