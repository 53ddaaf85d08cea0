"""Another library's vectors get the term of co-occurrence from a log of pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import BundleInvariantError, ChosenTogether, TrainingFacts, bundle_from_vectors
from longtail.bundle.manifest import LogColumns
from longtail.index import open_releases
from tests.index.test_cli import run
from tests.index.test_vectors import LABELS, draw_vectors, read, written

BEGIN = 1_750_000_000
HAND = {"query_id": ["b", "a", "b", "a"], "label_id": ["i2", "i1", "i1", "i0"], "time": [4, 2, 3, 1]}
"""a chooses i0, i1, then b i1, i2."""


def log(folder: Path, name: str = "log", **columns: list[Any]) -> Path:
    """Write a log whose times are seconds after BEGIN."""
    table = columns or HAND
    if "time" in table:
        table = table | {"time": [BEGIN + seconds for seconds in table["time"]]}
    pq.write_table(pa.table(table), folder / f"{name}.parquet")
    return folder / f"{name}.parquet"


def draw_groups(rng: np.random.Generator, begin: int, queries: int = 60) -> dict[str, list[Any]]:
    """Each query chooses five labels of one of ten groups, i0 to i99."""
    chosen = np.concatenate([10 * (query % 10) + rng.permutation(10)[:5] for query in range(queries)])
    return {
        "query_id": [f"q{query}" for query in range(queries) for _ in range(5)],
        "label_id": [f"i{row}" for row in chosen],
        "time": [begin + second for second in range(5 * queries)],
    }


def test_pairs_become_a_walk_of_half_a_nat(tmp_path: Path) -> None:
    bundle = read(written(tmp_path), pairs=log(tmp_path))
    bundle.write(tmp_path / "bundle")
    term, remembered = bundle.cooccurrence, bundle.remembered
    assert term is not None
    assert remembered is not None
    settings = term.settings
    assert (settings.kind, settings.power, settings.neighbours, settings.last) == ("walk", 0.5, 20, 20)
    assert (settings.decay, settings.default, settings.until) == (0.9, 0.0, BEGIN + 4)
    assert bundle.manifest.cooccurrence == settings
    # C = 1/2 between i0 and i1, i1 and i2; d = 1, 2, 1.
    weights = term.matrix().toarray() / settings.scale
    np.testing.assert_allclose(weights[0, 1], 1 / 2 / 2**0.5)
    np.testing.assert_allclose(weights[1, [0, 2]], 1 / 2 / 2)
    assert np.count_nonzero(weights) == 4
    rows_a, rows_b = (remembered.history(name).tolist() for name in "ab")
    assert (rows_a, rows_b) == ([0, 1], [1, 2])
    c_of_a, c_of_b = np.zeros((2, LABELS))
    c_of_a[[0, 1, 2]] = 1 / 4, 0.9 / 2 / 2**0.5, 1 / 4
    c_of_b[[0, 1, 2]] = 0.9 / 4, 1 / 2 / 2**0.5, 0.9 / 4
    np.testing.assert_allclose(settings.scale * (c_of_a.std() + c_of_b.std()) / 2, 0.5, rtol=1e-5)


def test_without_times_rows_are_in_their_order(tmp_path: Path) -> None:
    bundle = read(written(tmp_path), pairs=f"SELECT query_id, label_id FROM '{log(tmp_path)}'", remembered=1)
    assert bundle.cooccurrence is not None
    assert bundle.remembered is not None
    assert (bundle.cooccurrence.settings.decay, bundle.cooccurrence.settings.until) == (1.0, None)
    assert [bundle.remembered.history(name).tolist() for name in "ab"] == [[0], [1]]
    assert read(written(tmp_path), pairs=log(tmp_path), remembered=0).remembered is None


def test_held_out_pairs_choose_the_weight_where_queries_have_ids(tmp_path: Path) -> None:
    pairs = log(tmp_path, **draw_groups(np.random.default_rng(1), 0))
    vectors = list(draw_vectors(5)[:60])  # which know nothing of the groups
    queries = {"query_id": [f"q{query}" for query in range(60)], "vector": vectors}
    pq.write_table(pa.table(queries), tmp_path / "queries.parquet")
    chosen = read(written(tmp_path), pairs=pairs, queries=tmp_path / "queries.parquet").cooccurrence
    assert chosen is not None
    assert chosen.settings.default >= 0.5

    # The last pair's label has the query's own vector, which no weight betters.
    last = [int(id_[1:]) for id_ in draw_groups(np.random.default_rng(1), 0)["label_id"][4::5]]
    pq.write_table(pa.table(queries | {"vector": list(1000 * draw_vectors()[last])}), tmp_path / "queries.parquet")
    unit = draw_vectors() / np.linalg.norm(draw_vectors(), axis=1, keepdims=True)
    term = read(written(tmp_path, vector=list(unit)), pairs=pairs, queries=tmp_path / "queries.parquet").cooccurrence
    assert term is not None
    assert term.settings.default == 0


def test_the_command_adds_the_term_and_the_release_is_refreshed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = log(
        tmp_path,
        user=["u1", "u1", "u2"],
        label_id=["i0", "i1", "none"],
        clicked=["2026-01-01", "2026-01-02", "2026-01-03"],
    )
    releases = tmp_path / "releases"
    assert run("from-vectors", written(tmp_path), "--pairs", pairs, "--releases", releases) == 2
    assert (
        "expected query ids in 'query_id', or in the only column besides 'label_id' and 'time', found user"
        in capsys.readouterr().err
    )
    query = f"SELECT user, label_id, clicked AS time FROM '{pairs}'"
    arguments = ["from-vectors", written(tmp_path), "--pairs", query, "--releases", releases]
    assert run(*arguments, "--name", "first", "--publish") == 0
    assert "pairs: the weight of co-occurrence is 0 unless requests give it" in capsys.readouterr().out
    later = log(tmp_path, "later", user=["u1"], label_id=["i7"], clicked=["2026-01-04"])
    later = f"SELECT user, label_id, clicked AS time FROM '{later}'"
    assert run("refresh", releases, later, "--publish") == 0

    stored = open_releases(releases)
    bundle = stored.open(str(stored.current())).bundle
    assert bundle.cooccurrence is not None
    assert bundle.remembered is not None
    assert bundle.remembered.history("u1").tolist() == [0, 1, 7]
    assert bundle.cooccurrence.rows_LN[7, :2].tolist() == [0, 1]
    assert bundle.cooccurrence.settings.log == LogColumns(query_id="user", label_id="label_id", timestamp="time")


def test_pairs_without_known_labels_are_refused() -> None:
    ids, counts = pa.array([f"i{row}" for row in range(LABELS)]), np.ones(LABELS, np.int64)
    table = pa.table({"query_id": ["a"], "label_id": ["other"]})
    with pytest.raises(BundleInvariantError, match="pairs name labels"):
        bundle_from_vectors(draw_vectors(), TrainingFacts(ids, counts, pairs=ChosenTogether(table)), name="none")
    pairs = ChosenTogether(pa.table({"query_id": ["a"], "label_id": ["i0"]}), query_ids=pa.array(["a"]))
    with pytest.raises(BundleInvariantError, match="every query has an id"):
        bundle_from_vectors(draw_vectors(), TrainingFacts(ids, counts, pairs=pairs), name="none")
    facts = TrainingFacts(ids, counts, pairs=pairs._replace(query_ids=None))
    lonely = bundle_from_vectors(draw_vectors(), facts, name="one")
    assert lonely.cooccurrence is not None
    assert (lonely.cooccurrence.rows_LN == -1).all()
    lonely.validate()
