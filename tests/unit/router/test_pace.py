"""When requests go on whose workers were lost."""

import pytest

from penstock.router.config import MigrationConfig
from penstock.router.retries import MigrationPace


def waits(pace: MigrationPace, count: int, now_s: float = 0.0) -> list[float]:
    found = [pace.depart(now_s) for _ in range(count)]
    pace.check()
    return found


@pytest.mark.parametrize("streams", [1074, 2048, 16_384])
def test_however_many_are_lost_together_all_go_on_within_a_second(streams):
    pace = MigrationPace(MigrationConfig())
    for _ in range(streams):
        pace.expect(1)
    found = []
    for _ in range(streams):
        pace.expect(-1)
        found.append(pace.depart(0.0))
    pace.check()
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1.0, abs=0.01)
    assert found[streams // 2] == pytest.approx((streams / 2 - 256) / (streams - 256), abs=0.01)


def test_those_that_come_meanwhile_wait_behind_and_nothing_is_saved_up():
    pace = MigrationPace(MigrationConfig(at_once=4, spread_s=1.0))
    assert waits(pace, 6) == [0.0] * 4 + [0.25, 0.5]
    assert waits(pace, 1, 0.25) == [0.5]
    assert waits(pace, 1, 0.75) == [0.25]
    assert waits(pace, 3, 1.5) == [0.0, 0.0, 0.25]
    assert waits(pace, 5, 100.0) == [0.0] * 4 + [0.25]
