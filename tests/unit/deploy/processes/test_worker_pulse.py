from types import SimpleNamespace

import pytest

from penstock.core.types.load import WorkerLoad
from penstock.deploy.messages import Beat
from penstock.deploy.processes.worker_process import _pulse


@pytest.mark.parametrize(
    ("load", "beat"),
    [
        (WorkerLoad(steps=3), Beat(steps=3)),
        (WorkerLoad(steps=3, running_requests=1), Beat(steps=3, has_requests=True)),
        (WorkerLoad(steps=3, waiting_requests=1), Beat(steps=3, has_requests=True)),
    ],
)
def test_a_heartbeat_says_how_far_the_engine_is(load, beat):
    assert _pulse(SimpleNamespace(load=lambda: load)) == beat
