from benchmarks.query_way import calls_of_a_query

FUNCTIONS, FILES, CALLS = 45, 23, 56
"""Ceilings of the way of one query; a change may lower them."""


def test_the_way_of_a_query_does_not_grow() -> None:
    calls = calls_of_a_query()
    listed = "\n".join(f"{count:3}  {file} {name}" for (file, name), count in sorted(calls.items()))
    assert 30 < len(calls) <= FUNCTIONS, listed
    assert len({file for file, _ in calls}) <= FILES, listed
    assert calls.total() <= CALLS, listed
