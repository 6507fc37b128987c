"""What operators do to a cache."""

import pytest
from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.types.events import Tier
from penstock.core.types.kv import KvFlush, KvList, KvPin, KvReport
from penstock.core.wire import pack_hashes
from penstock.kv.sessions.actions import KvActions
from tests.support.session_scene import OPEN, SessionScene


class Stage(SessionScene):
    def __init__(self):
        super().__init__(ttl_s=60)
        self.cleared = 0
        self.actions = KvActions(self.pool, self.sessions, self.clear)

    def clear(self):
        self.cleared += 1
        self.sessions.clear()
        self.pool.reset()

    def act(self, action):
        report = self.actions.act(action)
        self.check()
        return report

    def packed(self, numbers):
        return pack_hashes(self.hashes(numbers).ravel())


def test_the_device_alone_is_flushed_block_by_block():
    stage = Stage()
    stage.ask(None, [1, 2, 3])
    stage.ask("a", [4, 5], OPEN)
    running = stage.pool.match(stage.hashes([1]))
    stage.pool.acquire(running)
    stage.pool.take_events()
    assert stage.act(KvFlush(tier=Tier.DEVICE)) == KvReport(blocks=4)
    assert (stage.pool.num_cached, stage.cleared, len(stage.sessions)) == (1, 0, 0)
    assert sum(len(event.block_hashes) // 8 for event in stage.pool.take_events()) == 4
    assert stage.act(KvFlush()) == KvReport(blocks=1)
    assert stage.cleared == 1
    with pytest.raises(RequestError, match="tier: must be device, or left out for all tiers, got disk"):
        stage.act(KvFlush(tier=Tier.DISK))


def test_a_check_refuses_what_a_pin_would_and_pins_nothing():
    stage = Stage()
    stage.ask(None, [1, 2, 3])
    pin = KvPin(name="p", block_hashes=stage.packed([1, 2]), is_check=True)
    assert stage.act(pin) == KvReport()
    assert stage.act(KvList()).held == ()
    with pytest.raises(RequestError, match=r"ttl_s: must be <= .*sessions\.ttl_s_max"):
        stage.act(replace(pin, ttl_s=1e9))
