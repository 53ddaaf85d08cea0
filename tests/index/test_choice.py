"""What `auto` builds where it has a choice: by recall, rates and bytes, whatever the machine's own speed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.index import IndexSpec, Searcher, spec
from longtail.index.building import tuning
from longtail.index.building.tuning import TunedIndex, tune_index
from longtail.index.manifests import RecallAt, SearchParams, Trial
from longtail.index.recall import Calibration
from tests.bundles import make_bundle

KINDS = ("ivf_flat", "ivf_sq", "ivf_fastscan")
LABELS = 3_000


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([100, 124, None], 0),  # quicker, but not by a quarter
        ([100, 126, 110], 1),
        ([100, 130, 150], 2),
        ([100, None, None], 0),
        ([100, None, 125], 2),
        ([100, 60, 50], 0),
    ],
)
def test_another_kind_is_chosen_if_a_quarter_faster(rates: list[float | None], expected: int) -> None:
    trials = [
        Trial(kind=kind, params=SearchParams(), recall=[], queries_per_second=rate, bytes_per_label=1)
        for kind, rate in zip(KINDS, rates, strict=True)
    ]
    assert tuning.choose_kind(trials) == expected


def test_searchers_take_turns_and_the_fastest_round_counts() -> None:
    now, turns = 0.0, []

    def searcher(name: str, seconds: dict[int, list[float]]) -> Searcher:
        def search(queries: np.ndarray, k: int) -> None:
            nonlocal now
            query = int(queries[0, 0])
            turns.append((name, query, k))
            now += seconds[query].pop(0)

        return SimpleNamespace(search=search)  # type: ignore[return-value]

    # Disturbed in the first round, or in the last; 0.1 s and 0.3 s else.
    quick = searcher("quick", {0: [9, 0.1, 0.1, 0.1, 0.1], 1: [0.3, 0.3, 0.3, 0.3, 9]})
    slow = searcher("slow", {0: [0.5] * 5, 1: [0.5] * 5})
    calibration = SimpleNamespace(queries_QE=np.array([[0.0], [1.0]]), k=7)
    measured_rates = tuning.measure_rates([quick, slow], calibration, lambda: now)  # type: ignore[arg-type]
    assert measured_rates == pytest.approx([2 / 0.4, 2 / 1.0])
    assert turns[:4] == [("quick", 0, 7), ("quick", 1, 7), ("slow", 0, 7), ("slow", 1, 7)]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return make_bundle(labels=LABELS, dim=16, queries=20)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catalogues of these tests are too large for a flat index."""
    monkeypatch.setattr(spec, "FLAT_UP_TO", 1_000)


def tune_with_rates(rates: dict[str, float], bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> TunedIndex:
    def fixed_rates(searchers: Sequence[Searcher], _: Calibration) -> list[float]:
        return [rates[searcher.index.kind] for searcher in searchers]

    monkeypatch.setattr(tuning, "measure_rates", fixed_rates)
    return tune_index(bundle, IndexSpec(), lambda _: None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("quick", "expected"),
    [("ivf_fastscan", "ivf_fastscan"), pytest.param(None, "ivf_flat", marks=pytest.mark.nightly)],
)
def test_auto_chooses_the_fastest_kind(
    quick: str | None, expected: str, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tune_with_rates({kind: 300 if kind == quick else 100 for kind in KINDS}, bundle, monkeypatch)
    assert (built.kind, built.index.kind, built.chosen.kind) == (expected, expected, expected)
    assert tuple(trial.kind for trial in built.kinds) == KINDS
    assert {trial.kind for trial in built.trials} == set(KINDS)
    assert [trial.queries_per_second for trial in built.kinds] == [300 if kind == quick else 100 for kind in KINDS]
    flat, sq, fastscan = (trial.bytes_per_label for trial in built.kinds)
    # Of 3,000 labels, 17 coordinates and 99 cells: codes (of scalars 32, with zeros), ids of 8 bytes, and 3 bytes of
    # centroids, 5 for scalars.
    assert 4 * 17 + 8 < flat < 4 * 17 + 8 + 4
    assert 32 + 8 < sq < 32 + 8 + 6
    assert 5 + 8 < fastscan < sq
    recall, _ = Calibration(bundle, bundle.rows()).measure(built.searcher(bundle))
    assert recall == built.recall  # of this kind, not of another at the same params
    assert built.chosen.lowest.recall >= 0.99


@pytest.mark.usefixtures("small")
def test_a_kind_that_recalls_too_little_is_not_timed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Calibration.measure

    def worse(self: Calibration, searcher: Searcher, k: int | None = None) -> tuple[list[RecallAt], float]:
        recall, rate = measure(self, searcher, k)
        lost = 0.9 if searcher.index.kind == "ivf_fastscan" else 1
        # At one place on the dials only.
        return [recall[0].model_copy(update={"recall": recall[0].recall * lost}), *recall[1:]], rate

    monkeypatch.setattr(Calibration, "measure", worse)
    built = tune_with_rates({"ivf_flat": 100, "ivf_sq": 100, "ivf_fastscan": 900}, bundle, monkeypatch)
    assert built.kind == "ivf_flat"
    assert [trial.queries_per_second for trial in built.kinds] == [100, 100, None]
    assert built.kinds[2].lowest.recall <= 0.9
