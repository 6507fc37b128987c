"""A tenant's limits: what is admitted, what is refused, and when one may come back; the clock is a number."""

import pytest

from penstock.frontend.errors import RateLimitError
from penstock.frontend.tenants.bucket import Bucket
from penstock.frontend.tenants.key_file import TenantConfig
from penstock.frontend.tenants.usage import Usage


def refused(usage: Usage, now_s: float) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        usage.admit(now_s)
    usage.check()
    assert caught.value.http_status == 429
    return caught.value


def test_a_bucket_fills_at_its_rate_up_to_its_burst_and_debts_are_paid_first() -> None:
    bucket = Bucket(2.0, 10.0, now_s=5.0)
    bucket.take(9.0, 5.0)
    assert bucket.level(5.0) == 1.0
    assert bucket.level(4.0) == 1.0, "time does not run back"
    bucket.take(11.0, 5.0)
    assert bucket.wait_s(1.0, 5.0) == pytest.approx(5.5)
    assert bucket.level(10.5) == pytest.approx(1.0)
    assert bucket.level(1e9) == 10.0
    bucket.take(-3.0, 1e9)
    assert bucket.level(1e9) == 10.0, "what is given back does not add to a full one"
    bucket.reset(1.0, 4.0, 1e9)
    assert bucket.level(1e9) == 4.0
    bucket.check()


def test_requests_past_the_rate_come_back_when_there_is_one() -> None:
    usage = Usage("t", TenantConfig(requests_per_s=4), 0.0)
    for _ in range(4):
        usage.admit(0.0)
    error = refused(usage, 0.0)
    assert (error.limit, error.retry_after_s) == ("requests_per_s", pytest.approx(0.25))
    assert "tenant 't'" in error.message
    assert "its limit requests_per_s is 4" in error.message
    usage.admit(0.25)
    refused(usage, 0.25)
    slow = Usage("t", TenantConfig(requests_per_s=0.1), 0.0)
    slow.admit(0.0)
    assert refused(slow, 0.0).retry_after_s == pytest.approx(10.0)
    assert usage.inflight == 5, "a refused request takes no place"


def test_no_more_than_so_many_are_in_flight() -> None:
    usage = Usage("t", TenantConfig(concurrency=2), 0.0)
    first, _ = usage.admit(0.0), usage.admit(0.0)
    assert refused(usage, 0.0).limit == "concurrency"
    assert first.end(1.0) == (0, 0)
    assert first.end(1.0) == (0, 0)
    usage.admit(1.0)
    assert refused(usage, 1.0).limit == "concurrency"


def test_tokens_are_charged_as_expected_and_then_as_used() -> None:
    usage = Usage("t", TenantConfig(tokens_per_min=6000), 0.0)
    use = usage.admit(0.0)
    use.charge(5000, 9000, lambda: (5000, 100), 0.0)
    assert usage.view(0.0).tokens_left == 6000 - 5000 - 256, "an answer of the usual length"
    assert use.end(0.0) == (5000, 100)
    assert usage.view(0.0).tokens_left == 900
    assert usage.mean_output_tokens == pytest.approx(256 - 156 / 16)
    short = usage.admit(0.0)
    short.charge(2000, 10, lambda: (2000, 10), 0.0)
    error = refused(usage, 0.0)
    assert (error.limit, error.retry_after_s) == ("tokens_per_min", pytest.approx(1111 / 100))
    short.end(0.0)
    usage.admit(11.2)


def test_a_prompt_larger_than_a_minutes_tokens_is_served_and_paid_for() -> None:
    usage = Usage("t", TenantConfig(tokens_per_min=60), 0.0)
    use = usage.admit(0.0)
    use.charge(600, 1, lambda: (600, 1), 0.0)
    use.end(0.0)
    assert refused(usage, 0.0).retry_after_s == pytest.approx(542.0)
    usage.admit(542.1)


def test_other_limits_keep_what_was_used() -> None:
    usage = Usage("t", TenantConfig(requests_per_s=2, concurrency=9), 0.0)
    usage.admit(0.0)
    usage.admit(0.0)
    usage.limit(TenantConfig(requests_per_s=1, concurrency=2), 0.0)
    assert refused(usage, 5.0).limit == "concurrency"
    usage.limit(TenantConfig(requests_per_s=1), 5.0)
    usage.admit(5.0)
    assert refused(usage, 5.0).limit == "requests_per_s"
    usage.limit(TenantConfig(), 5.0)
    for _ in range(1000):
        usage.admit(5.0)
