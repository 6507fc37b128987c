"""What two load reports say of a worker's speed, and what they do not."""

import msgspec
import pytest

from penstock.core.types.instances import Prices
from penstock.core.types.load import WorkerLoad
from penstock.router.workers.price_correction import FORGOTTEN_S, PriceCorrection

PRICES = Prices(
    prefill_step_s=0.003,
    prefill_token_s=2e-5,
    prefill_pair_s=1e-9,
    decode_step_s=0.006,
    decode_sequence_s=1e-5,
    decode_token_s=4e-8,
)


class Reports:
    """A worker that decodes ten requests, `slowness` times as slow as it says."""

    def __init__(self, prices: Prices | None = PRICES) -> None:
        self.price_correction = PriceCorrection(prices)
        self.load = WorkerLoad(running_requests=10, context_tokens=50_000)
        self.now_s = 100.0
        self.slowness = 1.0
        self.send()

    def send(self, **changes: int) -> bool:
        self.load = msgspec.structs.replace(self.load, **changes)
        return self.price_correction.report(self.load, self.now_s)

    def decode(self, steps: int = 50, **changes: int) -> bool:
        context = self.load.context_tokens
        mean = context + 10 * steps / 2
        step_s = PRICES.decode_step_s + 10 * PRICES.decode_sequence_s + mean * PRICES.decode_token_s
        self.now_s += self.slowness * steps * step_s
        counted = {"context_tokens": context + 10 * steps, "steps": self.load.steps + steps}
        counted["generated_tokens"] = self.load.generated_tokens + 10 * steps
        return self.send(**counted | changes)


@pytest.mark.parametrize(
    ("steps", "changes"),
    [(7, {}), (50, {"prefilled_tokens": 1}), (50, {"running_requests": 0})],
    ids=["too few steps", "a prompt was computed", "it was idle"],
)
def test_intervals_that_say_nothing(steps: int, changes: dict[str, int]) -> None:
    reports = Reports()
    reports.slowness = 3.0
    for number in range(1, 9):
        more = {name: value * number for name, value in changes.items()}
        assert not reports.decode(steps, **more)
    assert reports.price_correction.factor == 1.0


def test_what_was_learned_of_an_idle_worker_is_forgotten() -> None:
    reports = Reports()
    reports.slowness = 3.0
    for _ in range(3):
        reports.decode()
    assert not reports.price_correction.forget_if_idle(reports.now_s + 1000.0), "it is busy"
    reports.decode(running_requests=0)
    assert not reports.price_correction.forget_if_idle(reports.now_s + FORGOTTEN_S - 1)
    assert reports.price_correction.forget_if_idle(reports.now_s + FORGOTTEN_S)
    assert reports.price_correction.factor == 1.0
    assert not reports.price_correction.forget_if_idle(reports.now_s + 2 * FORGOTTEN_S), "nothing is left"
