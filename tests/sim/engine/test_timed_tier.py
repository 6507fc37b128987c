"""Tiers that take time: their loads go one after another, and end with everything or, when cancelled, with nothing."""

import asyncio

import numpy as np
import pytest

from penstock.core.types.events import Tier
from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.roofline import Factors, Roofline
from penstock.sim.engine_timing import HostPace, LowerTier, TimedTier

RATES = {Tier.HOST: 10e9, Tier.DISK: 5e9, Tier.OBJECT: 1e9}
MODEL = Roofline(
    find_shape("llama-3.1-8b"), find_hardware("h100"), factors=Factors(storage_bytes_per_s=RATES)
)


def seconds(num_blocks):
    """Of a load of blocks of 16 tokens from the host."""
    return MODEL.onboard_s(num_blocks * 131072 * 16, Tier.HOST)


def hashes(*names):
    return np.array([(name, name) for name in names], dtype=np.uint64)


def tier_of(pace, num_blocks=8):
    return TimedTier(LowerTier(Tier.HOST, num_blocks), MODEL, block_size=16, pace=pace)


def filled(pace, *prefixes):
    tier = tier_of(pace)
    for prefix in prefixes:
        assert tier.offload(hashes(*prefix), range(len(prefix)), None) == ()
    return tier


@pytest.mark.virtual
async def test_loads_end_one_after_another_with_all_blocks():
    loop, ended = asyncio.get_running_loop(), []
    tier = filled(HostPace(), (1, 2), (3,))
    assert tier.locate(hashes(1, 2, 9)) == 2
    started_s = loop.time()
    tier.load(hashes(1, 2), [0, 1], lambda count: ended.append((count, loop.time() - started_s)))
    assert tier.load_s(1) == pytest.approx(seconds(2) + seconds(1))
    tier.load(hashes(3), [2], lambda count: ended.append((count, loop.time() - started_s)))
    await asyncio.sleep(1)
    assert ended == [(2, pytest.approx(seconds(2))), (1, pytest.approx(seconds(2) + seconds(1)))]
    assert tier.pool.num_active == 0


@pytest.mark.virtual
async def test_a_cancelled_load_ends_at_once_without_blocks_and_its_link_stays_busy():
    ended = []
    tier = filled(HostPace(), (1, 2))
    load = tier.load(hashes(1, 2), [0, 1], ended.append)
    load.cancel()
    load.cancel()
    assert ended == [0]
    assert tier.load_s(0) == pytest.approx(seconds(2) + seconds(0))
    await asyncio.sleep(1)
    assert ended == [0]
    assert tier.pool.num_active == 0


@pytest.mark.virtual
async def test_nothing_arrives_on_a_stopped_host_and_all_when_it_goes_on():
    ended, pace = [], HostPace()
    tier = filled(pace, (1,), (2,))
    tier.load(hashes(1), [0], ended.append)
    cancelled = tier.load(hashes(2), [1], lambda count: ended.append(("cancelled", count)))
    pace.stop()
    await asyncio.sleep(1)
    assert ended == []
    cancelled.cancel()
    pace.go_on()
    assert ended == [("cancelled", 0), 1]


@pytest.mark.virtual
async def test_the_blocks_unused_for_longest_make_room_and_a_load_keeps_its_own():
    tier = tier_of(HostPace(), num_blocks=3)
    tier.offload(hashes(1, 2), range(2), None)
    tier.offload(hashes(3), range(1), None)
    tier.load(hashes(1), [0], lambda _count: None)
    tier.offload(hashes(4, 5, 6), range(3), None)
    assert tier.locate(hashes(1)) == 1
    assert tier.locate(hashes(4, 5, 6)) == 2
    assert tier.locate(hashes(3)) == tier.locate(hashes(1, 2)) - 1 == 0
    kinds = [type(event).__name__ for event in tier.take_events()]
    assert kinds.count("BlockRemoved") >= 1
