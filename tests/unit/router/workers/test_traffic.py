import pytest

from penstock.router.workers.traffic import Traffic


def test_the_rate_is_that_of_the_last_half_minute():
    traffic = Traffic()
    assert traffic.rate_per_s(0.0) == 0.0
    for tenth in range(3000):
        traffic.arrived(tenth / 10)
    assert traffic.rate_per_s(300.0) == pytest.approx(10.0, rel=0.02)
    assert traffic.rate_per_s(330.0) == pytest.approx(10.0 / 2.718, rel=0.02)
    traffic.check()


def test_the_mean_answer_begins_as_a_guess_and_follows_what_ends():
    traffic = Traffic()
    assert traffic.mean_output_tokens == 256.0
    traffic.ended(100, now_s=1.0)
    assert traffic.mean_output_tokens == pytest.approx(178.0, rel=0.01)
    for second in range(2000):
        traffic.ended(100, now_s=float(second))
    assert traffic.mean_output_tokens == pytest.approx(100.0, rel=0.01)
    for second in range(2000, 2600):
        traffic.ended(10, now_s=float(second))
    assert 10 < traffic.mean_output_tokens < 50  # ten minutes keep a third
    traffic.check()
