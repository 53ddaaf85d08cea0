"""Factors of hours of the week: by hand, of past sums and of coming periods, and shrunk where pairs are few."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.bundle.calendar import HOURS, Calendar, hour_of_week, pairs_by_hour

HOUR = 3_600.0


def sales(noon: float) -> np.ndarray:
    """Pairs of two groups: alike in every hour, but for one around 12:00 of every day."""
    pairs = np.full((2, HOURS), 100.0)
    pairs[0] = np.where(np.isin(np.arange(HOURS) % 24, [11, 12, 13]), noon, 100.0)
    return pairs


def shares(calendar: Calendar, begin: float) -> np.ndarray:
    """The groups' shares of the hour that begins at a time."""
    share = calendar.pairs.sum(axis=1) * calendar.ahead(begin, HOUR)
    return np.asarray(share / share.sum())


def test_hours_count_from_thursday_midnight_utc() -> None:
    assert hour_of_week(1_700_000_000.0) == 5 * 24 + 22  # Tuesday, 14 November 2023, 22:13
    np.testing.assert_array_equal(hour_of_week(np.array([0.0, HOUR - 1, HOURS * HOUR])), [0, 0, 0])


def test_pairs_are_summed_by_group_and_hour() -> None:
    groups, times, amounts = np.array([1, 1, 0]), np.array([10.0, 20.0, 5 * HOUR]), np.array([1.0, 0.5, 2.0])
    pairs = pairs_by_hour(groups, times, amounts, 2)

    assert pairs.shape == (2, HOURS)
    assert (pairs[1, 0], pairs[0, 5], pairs.sum()) == (1.5, 2.0, 3.5)


def test_the_hour_of_the_day_moves_shares() -> None:
    calendar = Calendar(sales(300.0), ["hour"], 1e-6)

    np.testing.assert_allclose(shares(calendar, 12 * HOUR), [0.75, 0.25], rtol=1e-6)
    np.testing.assert_allclose(shares(calendar, 11 * HOUR), [7 / 10, 3 / 10], rtol=1e-6)  # with the hour before it
    np.testing.assert_allclose(shares(calendar, 40 * HOUR), [0.5, 0.5], rtol=1e-6)


def test_day_effect_uses_24_hours_around_each_hour() -> None:
    pairs = np.full((2, HOURS), 100.0)
    pairs[0, 48:72] = 300.0  # Saturday
    calendar = Calendar(pairs, ["day"], 1e-6)

    saturday = 23.5 * 300 + 0.5 * 100, 24 * 100  # 12 h to each side of noon's hour, with half of Sunday's first one
    np.testing.assert_allclose(shares(calendar, 60 * HOUR), np.array(saturday) / sum(saturday), rtol=1e-6)
    np.testing.assert_allclose(shares(calendar, 120 * HOUR), [0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(shares(calendar, 48 * HOUR), [2 / 3, 1 / 3], rtol=0.02)  # half of both days
    np.testing.assert_allclose(calendar.ahead(0, HOURS * HOUR), 1, atol=0.02)


@pytest.mark.parametrize("windows", [["day"], ["hour"], ["day", "hour"]])
def test_few_pairs_give_no_effect(windows: list) -> None:
    calendar = Calendar(sales(300.0) / 1e6, windows, 30)

    np.testing.assert_allclose(calendar.ahead(12 * HOUR, HOUR), 1, atol=1e-3)


def test_fast_decay_uses_the_factor_of_the_last_hours() -> None:
    calendar = Calendar(sales(300.0), ["hour"], 1e-6)
    past = calendar.past(13 * HOUR, np.array([HOUR / 10, 1e4 * HOURS * HOUR]))

    np.testing.assert_allclose(past[:, 0], calendar.ahead(12 * HOUR, HOUR), rtol=1e-3)
    np.testing.assert_allclose(past[:, 1], 1, atol=1e-3)


def test_gain_is_likelihood_over_shares() -> None:
    calendar = Calendar(sales(300.0), ["hour"], 1e-6)
    share = calendar.pairs.sum(axis=1) / calendar.pairs.sum()
    gains = calendar.gains(np.array([0, 1]), np.array([12.5 * HOUR, 12.5 * HOUR]))

    np.testing.assert_allclose(gains, np.log(np.array([0.75, 0.25]) / share), atol=1e-3)
