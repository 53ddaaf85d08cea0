from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.query_way import calls_of_a_load, calls_of_a_query


@pytest.mark.parametrize(
    ("count_calls", "functions", "files", "calls"),
    [(calls_of_a_query, 44, 22, 54), (calls_of_a_load, 106, 38, 214)],
    ids=["query", "load"],
)
def test_the_way_of_a_query_and_of_a_load_does_not_grow(
    count_calls: Callable[[], Counter[tuple[str, str]]], functions: int, files: int, calls: int
) -> None:
    counts = count_calls()
    listed = "\n".join(f"{count:3}  {file} {name}" for (file, name), count in sorted(counts.items()))
    assert 30 < len(counts) <= functions, listed
    assert len({file for file, _ in counts}) <= files, listed
    assert counts.total() <= calls, listed
