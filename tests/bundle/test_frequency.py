import math

import numpy as np
import pytest

from longtail.bundle import Buckets, log_frequencies

HEAD, TORSO, TAIL, NEW = 0, 1, 2, 3


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_frequencies_are_smoothed_by_half_a_pair_each() -> None:
    expected = [math.log(3.5 / 6), math.log(1.5 / 6), math.log(0.5 / 6), math.log(0.5 / 6)]

    np.testing.assert_allclose(log_frequencies(counts(3, 1, 0, 0)), expected, rtol=1e-15)


def test_rare_label_is_not_clipped() -> None:
    log_rare = log_frequencies(counts(10**9, 1))[1]

    assert log_rare == pytest.approx(math.log(1.5 / (10**9 + 2)), abs=1e-12)
    assert log_rare < -20


def test_unseen_labels_have_a_finite_log_and_shares_sum_to_one() -> None:
    observed = np.zeros(100_000, np.int64)
    observed[0] = 10**9
    log_pn = log_frequencies(observed)

    assert np.isfinite(log_pn).all()
    assert np.logaddexp.reduce(log_pn) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("labels", "smoothing", "message"),
    [
        (counts(), 0.5, "expected at least one label, received none"),
        (counts(3, -2), 0.5, "expected counts >= 0, received -2 in row 1"),
        (counts(3), 0, "expected smoothing > 0, received 0"),
        (counts(3), math.nan, "expected smoothing > 0, received nan"),
    ],
)
def test_invalid_counts_are_refused(labels: np.ndarray, smoothing: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log_frequencies(labels, smoothing=smoothing)


def test_quantiles_use_labels_with_pairs() -> None:
    buckets = Buckets.by_quantile(counts(0, 0, 0, 1, 2, 3, 4, 5))

    assert (buckets.tail_upto, buckets.head_above) == pytest.approx((1 + 4 * 0.33, 1 + 4 * 0.66))
    assert buckets.assign(counts(0, 1, 2, 3, 4, 5)).tolist() == [NEW, TAIL, TAIL, TORSO, HEAD, HEAD]


def test_unseen_labels_are_new_when_all_are_head() -> None:
    labels = counts(0, 5, 5)

    assert Buckets.by_quantile(labels).assign(labels).tolist() == [NEW, TAIL, TAIL]
    thresholds = {"scheme": "count", "head_above": 0, "tail_upto": 0}
    assert Buckets(**thresholds).assign(labels).tolist() == [NEW, HEAD, HEAD]
    assert Buckets.by_quantile(counts(0, 0)).assign(counts(0, 0)).tolist() == [NEW, NEW]


def test_count_thresholds_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="expected head_from > torso_from > 0, received 5 and 9"):
        Buckets.by_count(head_from=5, torso_from=9)
