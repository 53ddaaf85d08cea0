"""The dial of whole jobs: recipes trained on pairs of a known p(y|x), read back from the bundles they wrote.

Without a valid split the default λ is that of the theory; there the bundle's scores rank by p, and at λ = 0 by p/ν.
test_implied_noise.py has every cell in closed form. Legend: `X` queries, `L` labels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from longtail.bundle import Bundle
from longtail.bundle.tower import onnx_session
from longtail.trainer.job import fit
from tests.trainer import tiny

COUNTS = np.array([[37, 31, 14, 10, 5, 3], [21, 32, 27, 3, 8, 9], [37, 28, 8, 3, 14, 10]])
"""Of 100 pairs of a query, those with a label of every group."""
X, GROUPS = COUNTS.shape
COPIES, TIMES, B = 16, 6, 256
L = GROUPS * COPIES
"""Groups of labels that are alike: p(y|x) is small, as in a catalogue, and the mean over a group is steady."""
DATA = COUNTS / 100
PI = COUNTS.sum(axis=0) / 300
POPULARITY = {"name": "popularity", "negatives": L, "alpha": 0.5}
UNIFORM = {"name": "uniform", "negatives": L}
MEMORY = {"name": "cross_batch", "negatives": 2 * B}
MIXED = (255 * PI + 96 / GROUPS) / 351


CELLS: dict[str, tuple[dict[str, Any], str, np.ndarray, float]] = {
    "in_batch · unit": ({}, "π", PI, 0.1),
    "in_batch · importance": ({"weight": "importance"}, "uniform", np.ones(GROUPS), 0.1),
    "mixed · unit": ({"sampler": UNIFORM | {"name": "mixed"}}, "0.7265·π + 0.2735/L", MIXED, 0.1),
    "popularity(½) · unit": ({"sampler": POPULARITY}, "π^0.5", PI**0.5, 0.1),
    "uniform · tail": ({"sampler": UNIFORM, "weight": "tail"}, "π", PI, 0.2),
    "logistic · popularity(½) · unit": ({"family": "logistic", "sampler": POPULARITY}, "π^0.5", PI**0.5, 0.1),
    "logistic · uniform · equalised(½)": (
        {"family": "logistic", "sampler": UNIFORM, "weight": {"name": "equalised", "power": 0.5}},
        "π^0.5", PI**0.5, 0.1,
    ),
    "exponential · in_batch · unit, kept": (
        {"family": "exponential", "hits": "keep"}, "π", PI, 0.1,
    ),
    "pairwise logistic · in_batch · adaptive": (
        {"family": {"name": "logistic", "pairwise": True}, "weight": {"name": "adaptive", "exponent": 0.5}},
        "π^0.5", PI**0.5, 0.1,
    ),
    "importance, reweighted by π^−½": (
        {"weight": "importance", "sampler": UNIFORM, "reweight": 0.5}, "π^0.5", PI**0.5, 0.2,
    ),
    "nce · popularity(½)": ({"family": "nce", "sampler": POPULARITY}, "uniform", np.ones(GROUPS), 0.1),
    "logistic · cross_batch · unit": ({"family": "logistic", "sampler": MEMORY}, "π", PI, 0.1),
    "cross_batch · importance": ({"weight": "importance", "sampler": MEMORY}, "uniform", np.ones(GROUPS), 0.1),
}  # fmt: skip
"""`[loss]`, ν in words and in numbers, and how far log p may be off, in nats: softmax has its knee."""


def fit_log(folder: Path, log: dict[str, np.ndarray], *, dim: int = 4, **sections: Any) -> Bundle:
    """Train on a log, and read the bundle from its files."""
    pq.write_table(pa.table(log), folder / "train.parquet")
    columns = {"train": folder / "train.parquet", "query_id": "user_id", "label_id": "item_id"}
    recipe = tiny.recipe(
        data=columns | sections.pop("data", {}),
        query={"features": [tiny.USER | {"dim": dim}]}, label={"features": [tiny.ITEM | {"dim": dim}]},
        model={"dim": dim, "similarity": "dot", "temperature": 1, "label_bias": True},
        optimizer={"embedding_learning_rate": 0.05, "dense_learning_rate": 0.05, "schedule": "linear"},
        training={"epochs": 8, "batch_size": B}, **sections,
    )  # fmt: skip
    fit(recipe, folder / "out")
    return Bundle.load(folder / "out")


def repeat_cells(counts: np.ndarray, times: int) -> np.ndarray:
    """The cell x·L + y of every pair: each label of a group in as many pairs."""
    return np.repeat(np.arange(X * L), np.repeat(counts, COPIES, axis=1).ravel() * times)


def compute_scores(bundle: Bundle, bias_removal: float, popularity: float = 0.0) -> np.ndarray:
    """Logits of the queries and groups, as an index computes them, less their mean over groups; [X, GROUPS]."""
    names = np.array(bundle.vocabularies["user_id"].find_all([str(x) for x in range(X)]), np.int32)
    (queries_XD,) = onnx_session(bundle.query_tower, "query_tower.onnx").run(None, {"user_id": names})
    rows = bundle.augmentation.queries(queries_XD, bias_removal, popularity)
    scores_XL = rows @ bundle.rows().T / bundle.manifest.temperature
    in_order = np.argsort([int(id_) for id_ in bundle.labels.ids.to_pylist()])
    return centred(scores_XL[:, in_order].reshape(X, GROUPS, COPIES).mean(axis=2))


def centred(scores_XL: np.ndarray) -> np.ndarray:
    return scores_XL - scores_XL.mean(axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.nightly if i else []) for i, cell in enumerate(CELLS)],
)
def test_the_default_puts_the_probabilities_back_and_the_prior_takes_popularity_out(cell: str, tmp_path: Path) -> None:
    loss, name, noise_L, off = CELLS[cell]
    x, y = np.divmod(repeat_cells(COUNTS, TIMES), L)
    bundle = fit_log(tmp_path, {"user_id": x, "item_id": y}, loss=loss)
    dial = bundle.manifest.bias_removal
    link = 0.5 if cell.startswith("exponential") else 1.0
    assert (dial.noise, dial.chosen_by) == (name, "theory, for want of validation data")
    assert dial.default == (0.0 if name == "uniform" else link)
    removed_XG, raw_XG = compute_scores(bundle, dial.default), compute_scores(bundle, 0.0)
    np.testing.assert_allclose(removed_XG, centred(link * np.log(DATA)), atol=off)
    np.testing.assert_allclose(raw_XG, centred(link * np.log(DATA / noise_L)), atol=off)
    np.testing.assert_array_equal(removed_XG.argsort(axis=1), DATA.argsort(axis=1))
    assert (bundle.labels.log_popularity is None) == (name == "π")
    prior_XG = compute_scores(bundle, dial.default, popularity=-1.0)
    np.testing.assert_allclose(prior_XG, removed_XG - centred(np.log(PI)[None]), atol=0.01)


@pytest.mark.slow
def test_one_lambda_is_exact_for_all_objectives(tmp_path: Path) -> None:
    """Clicks and purchases prefer different labels, but share a batch, and so its noise [METHODS §2.4].

    λ = 1 gives Σ ŝ log p_o, whatever the objectives weigh in training; λ = 0 that over the frequency of all pairs.
    """
    kinds = {"click": COUNTS, "purchase": COUNTS[:, ::-1]}
    cells = [repeat_cells(counts, TIMES // 2) for counts in kinds.values()]
    x, y = np.divmod(np.concatenate(cells), L)
    bundle = fit_log(
        tmp_path, {"user_id": x, "item_id": y, "event": np.repeat(list(kinds), [len(block) for block in cells])}, dim=8,
        data={"events": {"column": "event", "weights": {"click": 1, "purchase": 1}}},
        objectives={
            "click": {"events": ["click"], "weight": 2, "export": 1}, "purchase": {"events": ["purchase"], "export": 3},
        },
    )  # fmt: skip

    served_XG = 0.25 * np.log(COUNTS / 100) + 0.75 * np.log(COUNTS[:, ::-1] / 100)
    noise_G = (PI + PI[::-1]) / 2
    assert bundle.manifest.bias_removal.default == 1
    np.testing.assert_allclose(compute_scores(bundle, 1.0), centred(served_XG), atol=0.1)
    np.testing.assert_allclose(compute_scores(bundle, 0.0), centred(served_XG - np.log(noise_G)), atol=0.1)
    prior_XG = compute_scores(bundle, 1.0, popularity=-1.0)
    weighed_G = (2 * PI + PI[::-1]) / 3
    np.testing.assert_allclose(prior_XG, compute_scores(bundle, 1.0) - centred(np.log(weighed_G)[None]), atol=0.01)


DAYS, HALF_LIFE = 60, 15
RISE = np.array([-1.2, -0.6, 0.0, 0.3, 0.9, 1.2])
"""Change of a group's log π over the log, nats."""
PRIORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in_batch · unit": ({}, {}),
    "in_batch · unit, weights that fade": ({}, {"weight": "weight"}),
    "popularity(½) · unit": ({"sampler": POPULARITY}, {}),
    "mixed · unit": ({"sampler": UNIFORM | {"name": "mixed"}}, {}),
    "in_batch · importance, weights that fade": ({"weight": "importance"}, {"weight": "weight"}),
    "exponential · in_batch · unit": ({"family": "exponential"}, {}),
}
"""`[loss]` and `[data]` of jobs on a log whose label frequencies move."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.nightly if i else []) for i, cell in enumerate(PRIORS)],
)
def test_the_prior_adds_later_log_probabilities_under_any_noise(cell: str, tmp_path: Path) -> None:
    """f + k·log(ν·π*/π_w) is k·log p*(y|x): p(x|y) is that of `COUNTS` on every day, and π moves by `RISE`."""
    loss, data = PRIORS[cell]
    taste_XG = COUNTS / COUNTS.sum(axis=0)
    share_TG = PI * np.exp(RISE * np.arange(DAYS)[:, None] / DAYS)
    share_TG /= share_TG.sum(axis=1, keepdims=True)
    rng = np.random.default_rng(0)
    expected_TXL = np.repeat(share_TG[:, None] * taste_XG, COPIES, axis=2) / COPIES * 28_800 / DAYS
    day, x, y = np.indices(expected_TXL.shape).reshape(3, -1)
    copies = rng.poisson(expected_TXL).ravel()
    day, x, y = (column.repeat(copies) for column in (day, x, y))
    log = {"user_id": x, "item_id": y, "at": 1.7e9 + 86_400.0 * day, "weight": 0.5 ** ((DAYS - day) / HALF_LIFE)}
    bundle = fit_log(
        tmp_path, log, data={"timestamp": "at"} | data, loss={"family": "logistic", "hits": "keep"} | loss,
        prior={"kind": "decayed", "horizon": "7d"},
    )  # fmt: skip
    link = 0.5 if cell.startswith("exponential") else 1.0
    assert (bundle.manifest.bias_removal.default, bundle.manifest.popularity.default) == (0, link)
    assert bundle.forecast is not None
    in_order = np.argsort([int(id_) for id_ in bundle.labels.ids.to_pylist()])
    truth_L = np.empty(L)
    truth_L[in_order] = np.log(share_TG[-1].repeat(COPIES) / COPIES)
    column = bundle.forecast.with_offset(truth_L).astype(np.float32)
    served = replace(bundle, labels=replace(bundle.labels, log_popularity=column))

    law_XG = taste_XG * share_TG[-1]
    off = compute_scores(served, 0.0, link) - centred(link * np.log(law_XG))
    assert np.ptp(off) < 0.2
