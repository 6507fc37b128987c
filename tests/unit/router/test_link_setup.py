"""What requests are charged for links over which nothing has moved, and what becomes of it."""

import msgspec
import pytest

from penstock.router.disagg import LinkSetup
from penstock.router.policies import make_policy
from penstock.router.selector import WorkerSelector
from tests.support.kv_pairs import at, costly, pairs, worker

SELECTOR = WorkerSelector(make_policy("kv"))


def links(num_slots=4):
    return LinkSetup(num_slots, SELECTOR)


@pytest.mark.parametrize(
    ("here", "there", "seconds"),
    [
        (costly("memory", "shm", "tcp"), costly("memory", "shm", "tcp"), 0.025),
        (costly("tcp"), costly("memory", "shm", "tcp"), 0.1),
        (costly("shm", "nixl"), costly("tcp", "nixl"), 1.0),
        (costly("tcp", "nixl", "shm", host=b"two"), costly("tcp", "nixl", "shm"), 1.0),
        (costly("tcp", "shm", host=b"two"), costly("tcp", "shm"), 0.1),
        (costly("memory"), costly("memory", listens=("memory",)), None),
        (costly("nixl"), costly("tcp"), None),
        (at(), at(), None),
        (None, costly("tcp"), None),
    ],
    ids=["host", "tcp", "nixl-alone", "hosts", "hosts-tcp", "process", "unfit", "unsaid", "no-kv"],
)
def test_a_set_up_takes_what_the_transport_does_that_will_be_used(here, there, seconds):
    found = pairs(worker("p", there), worker("d", here))
    setups_s = links(4).setups_s(found, 0)
    assert (None if setups_s is None else setups_s.tolist()) == (seconds and [0.0, seconds, 0.0, 0.0])


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_a_set_up_that_is_no_time_counts_for_nothing(nonsense):
    exchange = msgspec.structs.replace(costly("tcp"), setups_s=(nonsense,))
    found = pairs(worker("p", exchange), worker("d", exchange))
    assert links(2).setups_s(found, 0) is None
