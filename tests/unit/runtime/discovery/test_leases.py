from penstock.core.ids import WorkerId
from penstock.runtime.discovery.nats import Leases

ONE, OTHER = WorkerId(1), WorkerId(2)


def test_who_is_not_renewed_while_beats_come_back_has_lapsed():
    leases = Leases(3.0, longest_beat_s=1.0)
    leases.beat(0.0)
    leases.renew(ONE)
    leases.renew(OTHER)
    assert [leases.beat(float(now)) for now in (1, 2, 3)] == [[], [], []]
    leases.renew(OTHER)
    assert leases.beat(4.0) == [ONE]
    assert leases.beat(5.0) == []


def test_time_in_which_no_beat_came_back_is_not_counted():
    leases = Leases(3.0, longest_beat_s=1.0)
    leases.beat(0.0)
    leases.renew(ONE)
    assert leases.beat(60.0) == []  # the registry hung
    leases.restart()
    assert leases.beat(600.0) == []  # or was away
    assert leases.beat(601.0) == []
    leases.renew(ONE)
    assert [leases.beat(602.0 + beat) for beat in range(4)] == [[], [], [], [ONE]]


def test_who_was_withdrawn_does_not_lapse():
    leases = Leases(1.0, longest_beat_s=1.0)
    leases.beat(0.0)
    leases.renew(ONE)
    leases.forget(ONE)
    assert leases.beat(1.0) == leases.beat(5.0) == []
