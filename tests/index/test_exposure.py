"""Exposure of head, torso and tail along λ, and the range of λ in which it changes, of vectors from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle, TrainingFacts, bundle_from_vectors
from longtail.index.building.exposure import DialExposure, describe_exposure
from longtail.index.cli import app

LABELS, DIM = 400, 8
COUNTS_L = np.arange(LABELS)[::-1] ** 2 + 1


def make_vectors_bundle(
    scale: float, *, temperature: float = 1.0, similarity: str = "dot", counts: np.ndarray = COUNTS_L
) -> Bundle:
    rng = np.random.default_rng(0)
    vectors_LD = (scale * rng.normal(size=(LABELS, DIM))).astype(np.float32)
    queries_CD = rng.normal(size=(50, DIM)).astype(np.float32)
    ids = pa.array([f"i{row}" for row in range(LABELS)])
    facts = TrainingFacts(ids, counts, similarity, temperature)  # type: ignore[arg-type]
    return bundle_from_vectors(vectors_LD, facts, name="v", queries=queries_CD)


@pytest.mark.parametrize("similarity", ["dot", "cosine", "l2"])
@pytest.mark.parametrize("bias_removal", [-0.5, 0.0, 0.7])
def test_shares_equal_numpy(similarity: str, bias_removal: float) -> None:
    bundle = make_vectors_bundle(0.3, temperature=0.5, similarity=similarity)
    vectors_LD, queries_CD = bundle.embeddings.astype(np.float64), bundle.calibration_queries.astype(np.float64)
    scores_CL = queries_CD @ vectors_LD.T / 0.5
    if similarity == "l2":
        scores_CL = -np.square(queries_CD[:, None] - vectors_LD).sum(axis=2) / 0.5
    scores_CL += bias_removal * np.log((COUNTS_L + 0.5) / (COUNTS_L + 0.5).sum())
    shown_L = np.bincount(np.argsort(-scores_CL)[:, :20].ravel(), minlength=LABELS)
    point = DialExposure(bundle).measure(bias_removal)
    np.testing.assert_allclose(
        point.shares, [shown_L[bundle.labels.buckets == bucket].sum() / 1000 for bucket in range(4)], atol=0.002
    )
    assert point.coverage == pytest.approx((shown_L > 0).mean(), abs=0.005)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_the_range_is_where_the_head_grows_from_a_20th_to_19(scale: float) -> None:
    exposure = DialExposure(make_vectors_bundle(scale))
    ends = exposure.useful_range()
    assert ends is not None
    assert [exposure.measure(end).shares[0] for end in ends] == pytest.approx([0.05, 0.95], abs=0.01)
    reach = max(map(abs, ends))
    wide = DialExposure(make_vectors_bundle(scale, temperature=reach)).useful_range()
    assert wide == pytest.approx([end / reach for end in ends], rel=0.02, abs=0.02)


def test_equal_counts_have_no_range() -> None:
    bundle = make_vectors_bundle(1.0, counts=np.ones(LABELS, np.int64))
    assert DialExposure(bundle).useful_range() is None
    lines = [*describe_exposure(bundle, 1.0)]
    assert lines[0] == "λ: no λ was found between which the head's share of the answers goes from 5 % to 95 %"
    assert not any("--temperature" in line for line in lines)


def test_the_command_prints_exposure_where_queries_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = make_vectors_bundle(0.02)
    columns = {"label_id": bundle.labels.ids, "count": COUNTS_L, "vector": list(bundle.embeddings)}
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    np.save(tmp_path / "queries.npy", bundle.calibration_queries)
    command = ["from-vectors", str(tmp_path / "items.parquet"), "--releases", str(tmp_path / "releases")]
    app([*command, "--queries", str(tmp_path / "queries.npy")], standalone_mode=False)
    printed = capsys.readouterr().out
    low, high = DialExposure(bundle).useful_range() or (0, 0)
    assert f"λ: useful from {low:.2g} to {high:.2g}," in printed
    (temperature,) = re.findall(r"--temperature (\S+) gives the same answers", printed)
    assert float(temperature) == pytest.approx(max(-low, high), rel=0.05)
    assert len(re.findall(r"(?m)^λ: +-?[\d.e-]+: (?:head|torso|tail) \d+%", printed)) >= 5
    app(command, standalone_mode=False)
    assert "λ: useful" not in capsys.readouterr().out
