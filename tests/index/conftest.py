"""Bundles on disk and one release of every kind, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longtail.bundle import Bundle
from longtail.index import IndexSpec, Release, build, open_releases
from tests.bundles import make_bundle

SMALL = 600
LARGE = 12_000
KINDS = {
    "flat": SMALL,
    "ivf_flat": SMALL,
    "ivf_sq": SMALL,
    "ivf_fastscan": LARGE,
}
"""Spec → labels of the catalogue it is tried on."""


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of 600 labels with a label bias."""
    path = tmp_path_factory.mktemp("bundles") / "small"
    make_bundle(labels=SMALL, dim=8, bias=True, queries=20).write(path)
    return path


@pytest.fixture(scope="session")
def large_bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "large"
    make_bundle(labels=LARGE, dim=8, cosine=False, queries=20).write(path)
    return path


@pytest.fixture(scope="session")
def opened(
    bundle_path: Path, large_bundle_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Release]:
    """Opens the release of a spec of `KINDS`, building it the first time."""
    root = tmp_path_factory.mktemp("releases")
    releases: dict[str, Release] = {}

    def open_(spec: str) -> Release:
        if spec not in releases:
            path = bundle_path if KINDS[spec] == SMALL else large_bundle_path
            manifest = build(path, root, spec=IndexSpec(spec), name=f"release-{len(releases)}")
            releases[spec] = open_releases(root).open(manifest.name)
        return releases[spec]

    return open_


def brute_force(bundle: Bundle, query_D: np.ndarray, bias_removal: float, popularity: float = 0.0) -> np.ndarray:
    """T·s of every label at λ and μ [METHODS §6], float64 [L], from the bundle's own columns."""
    labels, temperature = bundle.labels, bundle.manifest.temperature
    scores = bundle.embeddings.astype(np.float64) @ query_D.astype(np.float64)
    scores += temperature * bias_removal * labels.log_pn.astype(np.float64)
    log_pi = labels.log_pn if labels.log_popularity is None else labels.log_popularity
    scores += temperature * popularity * log_pi.astype(np.float64)
    return scores if labels.bias is None else scores + temperature * labels.bias


def masked(scores_L: np.ndarray, eligible_L: np.ndarray, k: int) -> np.ndarray:
    """The k best eligible scores, descending, −inf where there are fewer."""
    best = -np.sort(-scores_L[eligible_L])[:k]
    return np.pad(best, (0, k - len(best)), constant_values=-np.inf)
