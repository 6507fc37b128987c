"""The retry budget and the quarantine."""

from penstock.core.types.requests import Request
from penstock.router.config import RetryConfig
from penstock.router.retries import PromptQuarantine, RetryBudget
from tests.support.scene import make_request


def request(*token_ids: int) -> Request:
    return make_request("r", token_ids)


def test_a_burst_is_free_and_then_tries_are_earned_with_time():
    budget = RetryBudget(RetryConfig(burst=3, per_s=2.0))
    assert [budget.spend(10.0) for _ in range(5)] == [True] * 3 + [False] * 2
    budget.check()
    assert [budget.spend(11.0) for _ in range(3)] == [True, True, False]
    assert [budget.spend(1000.0) for _ in range(4)] == [True] * 3 + [False]
    budget.check()


def test_requests_earn_tries():
    budget = RetryBudget(RetryConfig(burst=2, per_s=0.0, per_request=0.5))
    assert [budget.spend(0.0) for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend(0.0)
    budget.earn()
    assert budget.spend(0.0)
    for _ in range(100):
        budget.earn()
    budget.check()


def test_quarantine_ends_by_itself():
    quarantine = PromptQuarantine(RetryConfig(quarantine_s=60.0))
    assert quarantine.refusal(request(1, 2), 0.0) is None
    quarantine.put(request(1, 2), 0.0, "why")
    assert quarantine.refusal(request(1, 2), 20.0) == (40.0, "why")
    quarantine.put(request(3), 30.0, "why")
    quarantine.put(request(1, 2), 40.0, "why")
    quarantine.check()
    assert quarantine.refusal(request(1, 2), 61.0) == (39.0, "why")
    assert quarantine.refusal(request(3), 90.0) is None
    assert len(quarantine) == 1
    assert quarantine.refusal(request(1, 2), 100.0) is None
    assert len(quarantine) == 0


def test_quarantine_is_bounded():
    quarantine = PromptQuarantine(RetryConfig(quarantined_max=3))
    for token in range(10):
        quarantine.put(request(token), float(token), "why")
    assert len(quarantine) == 3
    assert quarantine.refusal(request(6), 10.0) is None
    assert quarantine.refusal(request(7), 10.0) is not None
    quarantine.check()
