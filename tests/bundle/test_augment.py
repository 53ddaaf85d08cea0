import numpy as np
import pytest
from hypothesis import given, strategies as st

from longtail.bundle import Augmentation

scale = st.floats(0.01, 10)


@given(
    seed=st.integers(0, 999),
    temperature=st.floats(0.05, 2),
    kappa=scale,
    kappa_bias=st.none() | scale,
    kappa_popularity=st.none() | scale,
    kappa_priors=st.lists(scale, max_size=3).map(tuple),
)
def test_row_times_query_is_temperature_times_the_served_score(
    seed: int,
    temperature: float,
    kappa: float,
    kappa_bias: float | None,
    kappa_popularity: float | None,
    kappa_priors: tuple[float, ...],
) -> None:
    rng = np.random.default_rng(seed)
    labels, queries = rng.standard_normal((7, 3), np.float32), rng.standard_normal((5, 3), np.float32)
    log_pn, bias = -rng.exponential(8, 7).astype(np.float32), rng.standard_normal(7, np.float32)
    log_pi = log_pn if kappa_popularity is None else -rng.exponential(8, 7).astype(np.float32)
    bias_removal, popularity = rng.uniform(-1, 2, (2, 5)).astype(np.float32)
    priors = rng.standard_normal((7, len(kappa_priors)), np.float32)
    weights = rng.uniform(-1, 2, (5, len(kappa_priors))).astype(np.float32)
    augmentation = Augmentation(temperature, kappa, kappa_bias, kappa_popularity, kappa_priors)

    rows = augmentation.rows(labels, log_pn, bias, None if kappa_popularity is None else log_pi, priors)
    product = augmentation.queries(queries, bias_removal, popularity, weights) @ rows.T
    unweighted = augmentation.queries(queries, bias_removal, popularity) @ rows.T

    logits = queries.astype(np.float64) @ labels.T.astype(np.float64) / temperature
    if kappa_bias is not None:
        logits += bias
    scores = logits + bias_removal[:, None] * log_pn + popularity[:, None] * log_pi
    np.testing.assert_allclose(unweighted, temperature * scores, atol=1e-4)
    scores += weights.astype(np.float64) @ priors.T
    np.testing.assert_allclose(product, temperature * scores, atol=1e-4)


def test_a_second_coordinate_by_hand() -> None:
    augmentation = Augmentation(temperature=0.5, kappa=2.0, kappa_bias=4.0, kappa_popularity=8.0)

    rows = augmentation.rows(np.float32([[1, 0]]), np.float32([-3]), np.float32([0.25]), np.float32([-1]))
    queries = augmentation.queries(np.float32([[0, 1], [1, 1]]), 1.0, np.float32([0, 2]))

    assert augmentation.extra_dims == 3
    assert rows.tolist() == [[1, 0, -6, 1, -8]]
    assert queries.tolist() == [[0, 1, 0.25, 0.125, 0], [1, 1, 0.25, 0.125, 0.125]]


def test_weights_of_a_shared_coordinate_add_up() -> None:
    augmentation, queries = Augmentation(temperature=0.1, kappa=0.7), np.float32([[0, 1], [1, 1]])

    both = augmentation.queries(queries, np.float32([0.5, -0.25]), np.float32([0.25, 1]))

    assert both.tobytes() == augmentation.queries(queries, np.float32([0.75, 0.75])).tobytes()
    assert augmentation.queries(queries, 0.3, 0.0).tobytes() == augmentation.queries(queries, 0.3).tobytes()


def test_kappa_gives_added_coordinates_twice_the_spread() -> None:
    embeddings = np.float32([[3, 1], [-3, -1]])
    log_pn, bias = np.float32([-1, -5]), np.float32([0.5, -0.5])
    typical = np.sqrt((9 + 1) / 2)

    augmentation = Augmentation.fitted(0.1, embeddings, log_pn, bias, np.float32([-2, -5]))

    assert augmentation.kappa == pytest.approx(2 * typical / 2)
    assert augmentation.kappa_bias == pytest.approx(2 * typical / 0.5)
    assert augmentation.kappa_popularity == pytest.approx(2 * typical / 1.5)


@pytest.mark.parametrize("labels", [3, 7, 1000, 41_001])
def test_constant_column_with_rounding_errors_is_not_scaled(labels: int) -> None:
    embeddings = np.random.default_rng(0).standard_normal((labels, 4), np.float32)
    uniform = np.full(labels, -np.log(labels), np.float32)
    uniform[0] = np.nextafter(uniform[0], 0)

    augmentation = Augmentation.fitted(0.1, embeddings, uniform, None, uniform)

    assert (augmentation.kappa, augmentation.kappa_popularity) == (1, 1)
