"""The signal-to-noise ratio of the gradient [BM20 Theorem 2, Appendix A.1], from its definition.

Legend: `X` queries, `L` labels, `E` pairs of a positive and a negative.
"""

import numpy as np
import pytest

from benchmarks.seeds.signal import overlap
from longtail.bundle.arrays import Float64

DATA = np.array([[0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])
NOISES = {
    "uniform": np.full((2, 3), 1 / 3),
    "frequency": np.tile(DATA.mean(axis=0), (2, 1)),
    "near the data": np.array([[0.55, 0.33, 0.12], [0.12, 0.22, 0.66]]),
    "the reverse": DATA[:, ::-1],
}


def by_definition(data: Float64, noise: Float64) -> float:
    """1/Tr[Cov[ĝ, ĝ] H⁻¹] of [BM20 eq. 12] at the optimum f = log p_D/p_n, every outcome of a step enumerated."""
    queries, labels = data.shape
    sigma = data / (data + noise)
    second = np.zeros((data.size, data.size))
    for x in range(queries):
        for y in range(labels):
            for drawn in range(labels):
                gradient = np.zeros(data.shape)
                gradient[x, y] -= queries * (1 - sigma[x, y])
                gradient[x, drawn] += queries * sigma[x, drawn]
                chance = data[x, y] * noise[x, drawn] / queries
                second += chance * np.outer(gradient.ravel(), gradient.ravel())
    hessian = (data + noise) * sigma * (1 - sigma)
    return float(1 / np.trace(second @ np.diag(1 / hessian.ravel())))


def signal_to_noise(data: Float64, noise: Float64) -> float:
    """The same in closed form [BM20 eq. 15]: 1/η = N Σ_x (L − 2 Σ_y α_xy)."""
    queries, labels = data.shape
    return 1 / float(queries**2 * (labels - overlap(data, noise).mean()))


@pytest.mark.parametrize("noise", [*NOISES.values(), DATA], ids=[*NOISES, "the data"])
def test_the_closed_form_is_the_definition(noise: Float64) -> None:
    assert signal_to_noise(DATA, noise) == pytest.approx(by_definition(DATA, noise), rel=1e-9)


def test_noise_like_the_data_has_the_largest_ratio() -> None:
    """There 2 Σ_y α = 1, and 1/η = N²(L − 1) = 4·2."""
    best = signal_to_noise(DATA, DATA)

    assert best == pytest.approx(1 / 8)
    np.testing.assert_allclose(overlap(DATA, DATA), 1)
    assert all(signal_to_noise(DATA, noise) < best for noise in NOISES.values())
    rng = np.random.default_rng(0)
    assert max(signal_to_noise(DATA, rng.dirichlet(np.ones(3), 2)) for _ in range(1000)) < best
