"""Accounts of tenants: what a second gives, what is saved up, what is owed, and that they are bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from longtail.serving import Settings
from longtail.serving.core.quotas import MOST_TENANTS, Quotas, tenant_of_address
from longtail.serving.errors import QuotaExceededError
from tests.serving.plane import plane_settings


class Bank:
    """Quotas with a clock that the test turns."""

    def __init__(self, root: Path, **settings: object) -> None:
        self.now = 0.0
        self.settings = plane_settings(root, **settings)
        self.quotas = Quotas(lambda: self.settings, lambda: self.now)

    def refusal(
        self, tenant: str = "a", *, search: bool = True, labels: bool | None = None
    ) -> tuple[str, float] | None:
        try:
            self.quotas.enter(tenant, search=search, labels=search if labels is None else labels)
        except QuotaExceededError as error:
            return error.quota, error.seconds
        return None


def test_requests_are_saved_up_for_some_seconds_and_no_longer(tmp_path: Path) -> None:
    bank = Bank(tmp_path, quota_requests=2, quota_burst_seconds=2)
    assert [bank.refusal() for _ in range(4)] == [None] * 4
    assert bank.refusal() == ("quota_requests", 0.5)
    assert bank.refusal("b") is None
    bank.now = 0.25
    assert bank.refusal(search=False) == ("quota_requests", 0.25)
    bank.now = 0.5
    assert bank.refusal() is None
    assert bank.refusal() == ("quota_requests", 0.5)
    bank.now = 1000
    assert [bank.refusal() for _ in range(5)] == [None] * 4 + [("quota_requests", 0.5)]


def test_less_than_one_request_in_that_time_is_one_now_and_then(tmp_path: Path) -> None:
    bank = Bank(tmp_path, quota_requests=0.1, quota_burst_seconds=2)
    assert bank.refusal() is None
    assert bank.refusal() == ("quota_requests", 10.0)
    bank.now = 10
    assert bank.refusal() is None


def test_labels_are_paid_for_when_they_are_known(tmp_path: Path) -> None:
    bank = Bank(tmp_path, quota_labels=100, quota_burst_seconds=1)
    assert bank.refusal() is None
    bank.quotas.charge("a", 350)
    assert bank.refusal() == bank.refusal(search=False, labels=True) == ("quota_labels", 2.5)
    assert bank.refusal(search=False) is None
    bank.now = 2.5
    assert bank.refusal() == ("quota_labels", 0.0)
    bank.now = 2.6
    assert bank.refusal() is None


def test_searches_at_a_time_end_when_they_do(tmp_path: Path) -> None:
    bank = Bank(tmp_path, quota_searches=2)
    assert [bank.refusal(), bank.refusal(), bank.refusal()] == [None, None, ("quota_searches", 1.0)]
    assert bank.refusal(search=False) is None
    bank.quotas.leave("a")
    assert bank.refusal() is None
    bank.quotas.leave("nobody")


def test_without_quotas_nothing_is_kept_and_with_them_not_for_ever(tmp_path: Path) -> None:
    bank = Bank(tmp_path)
    assert bank.refusal() is None
    assert not bank.quotas._accounts
    bank.settings = plane_settings(tmp_path, quota_searches=1)
    assert bank.refusal("held") is None
    for n in range(MOST_TENANTS + 100):
        assert bank.refusal(str(n), search=False) is None
    assert len(bank.quotas._accounts) == MOST_TENANTS
    assert bank.refusal("held") == ("quota_searches", 1.0)


def test_an_address_stands_for_all_that_one_client_has() -> None:
    assert tenant_of_address("192.0.2.7") == tenant_of_address("::ffff:192.0.2.7") == "192.0.2.7"
    assert tenant_of_address("2001:db8:1:2:3::4") == tenant_of_address("2001:db8:1:2:ffff::") == "2001:db8:1:2::/64"
    assert tenant_of_address("testclient") == "testclient"


@pytest.mark.parametrize(
    "wrong",
    [{"quota_requests": 0}, {"quota_requests": float("inf")}, {"quota_labels": -1}, {"quota_labels": float("nan")},
     {"quota_searches": 0}, {"quota_burst_seconds": 0}],
)  # fmt: skip
def test_quotas_that_are_none_are_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Settings(releases=tmp_path, **wrong)
