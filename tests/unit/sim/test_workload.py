import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.sim.trace import TraceRow, read_trace
from penstock.sim.workload import (
    SimPrompt,
    WorkloadConfig,
    make_sessions,
    mix,
    named,
    named_units,
    rescaled,
    trace_sessions,
)

DATA = Path(__file__).parents[2] / "data"


def hits(sessions, block_size):
    """Give (blocks an infinite cache has, all blocks)."""
    seen, found, total = set(), 0, 0
    for session in sessions:
        for turn in session.turns:
            names = [
                tuple(h)
                for h in session.prompt.block_hashes(block_size, 0, turn.input_tokens // block_size).tolist()
            ]
            depth = next((i for i, name in enumerate(names) if name not in seen), len(names))
            found, total = found + depth, total + len(names)
            seen.update(names)
    return found, total


def make(seed=1, **fields):
    return list(make_sessions(WorkloadConfig(**{"rate_per_s": 10.0} | fields), random.Random(seed)))


def test_blocks_are_equal_exactly_as_far_as_streams_are():
    shared = named_units(7, 4)
    one, other = SimPrompt(1, shared, 16), SimPrompt(2, shared[:2], 16)
    a, b = one.block_hashes(16, 0, 6), other.block_hashes(16, 0, 6)
    assert (a[:2] == b[:2]).all()
    assert not (a[2:] == b[2:]).any()
    assert (one.block_hashes(16, 3, 6) == a[3:]).all()
    wide = one.block_hashes(32, 0, 3)
    assert (wide[0] == other.block_hashes(32, 0, 1)[0]).all()
    assert len(np.unique(a)) == 2 * 6
    assert (wide == a[1::2]).all()


def test_no_block_is_common_beyond_what_the_ids_say():
    """Also where a block crosses from one id to the next, and the last one is not full."""
    one, other = (
        SimPrompt(own, np.array(ids, dtype=np.uint64), 512) for own, ids in ((1, [7, 8]), (2, [7, 9]))
    )
    for block_size in (16, 48, 100, 512, 1000, 1024):
        end = 2000 // block_size
        a, b = one.block_hashes(block_size, 0, end), other.block_hashes(block_size, 0, end)
        same = (a == b).all(axis=1)
        assert same.sum() == 512 // block_size
        assert same[: 512 // block_size].all()


def test_poisson_and_bursty_gaps_have_the_rate_and_the_variance_asked_for():
    for burstiness in (0.25, 1.0, 9.0):
        sessions = make(requests=8_000, burstiness=burstiness)
        gaps = np.array([b.at_s - a.at_s for a, b in pairwise(sessions)])
        assert gaps.mean() == pytest.approx(0.1, rel=0.08)
        assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burstiness, rel=0.15)


def test_a_conversation_grows_and_every_turn_continues_the_one_before():
    sessions = make(requests=30, turns=3, length_sigma=0.5, shared_prefix_tokens=100, prefix_groups=2)
    assert len(sessions) == 10
    for session in sessions:
        for before, turn in pairwise(session.turns):
            assert turn.input_tokens > before.input_tokens + before.output_tokens
            assert turn.think_s > 0 == session.turns[0].think_s
    groups = {tuple(s.prompt.shared.tolist()) for s in sessions}
    assert len(groups) == 2
    assert {len(group) for group in groups} == {6}


def test_a_mooncake_trace_keeps_its_prefixes_at_any_block_size():
    rows = read_trace(DATA / "mooncake_trace.jsonl")
    for block_size, shared in ((16, 32), (64, 8), (512, 1)):
        found, _ = hits(trace_sessions(rows, seed=0), block_size)
        assert found == shared * (len(rows) - 1)


@pytest.mark.parametrize(("ratio", "block_size"), [(0.0, 16), (0.3, 512), (0.8, 16)])
def test_an_azure_trace_gets_the_hit_ratio_asked_for(ratio, block_size):
    rng = random.Random(3)
    rows = [TraceRow(i * 0.1, rng.randrange(200, 4000), 10) for i in range(600)]
    sessions = list(trace_sessions(rows, seed=1, hit_ratio=ratio, block_size=block_size))
    found, _ = hits(sessions, block_size)
    assert found * block_size / sum(row.input_tokens for row in rows) == pytest.approx(ratio, abs=0.01)


def test_time_and_rate_scale():
    rows = [TraceRow(float(second), 10, 10) for second in range(11)]
    assert rescaled(rows, speed=2.0)[-1].at_s == 5.0
    faster = rescaled(rows, rate_per_s=22.0)
    assert len(faster) / faster[-1].at_s == pytest.approx(22.0)


def test_a_scale_that_makes_no_sense_is_refused():
    rows = [TraceRow(0.0, 1, 1), TraceRow(1.0, 1, 1)]
    for scales, message in (
        ({"speed": 2.0, "rate_per_s": 1.0}, "--speed 2 and --rate 1: give one of them"),
        ({"speed": 1e-12}, "--speed 1e-12: the trace would take 1.16e.07 days"),
        ({"rate_per_s": 1e-300}, "--rate 1e-300: the trace would take"),
    ):
        with pytest.raises(ConfigError, match=message):
            rescaled(rows, **scales)
    with pytest.raises(ConfigError, match="all 2 requests come at once"):
        rescaled([rows[0], rows[0]], rate_per_s=1.0)
    assert rescaled(rows[:1], rate_per_s=1.0) == rows[:1]


@pytest.mark.parametrize(
    ("tenants", "problem"),
    [
        ({"a": 0}, ".a: must be > 0.0, got 0"),
        ({"a": float("inf")}, ".a: must be a finite number"),
        ({"a": True}, ": must be a number, got True"),
        ({"": 1}, ": names must have 1 to 256 printable characters, got ''"),
        ({"a\n": 1}, ": names must have 1 to 256 printable characters, got 'a"),
        ({f"{n}": 1 for n in range(101)}, "100"),
    ],
)
def test_absurd_tenants_are_refused(tenants, problem):
    with pytest.raises(ConfigError) as refused:
        WorkloadConfig.parse({"rate_per_s": 1.0, "tenants": tenants}, source="spec.yaml")
    assert str(refused.value).startswith("spec.yaml: tenants")
    assert problem in str(refused.value)


def test_tenants_have_the_shares_asked_for_and_change_nothing_else():
    sessions = make(requests=4000, tenants={"flood": 9, "quiet": 1})
    quiet = sum(session.tenant == "quiet" for session in sessions)
    assert quiet / 4000 == pytest.approx(0.1, abs=0.02)
    assert {session.tenant for session in sessions} == {"flood", "quiet"}
    assert {session.tenant for session in make(requests=10)} == {""}


def test_lengths_have_the_mean_asked_for():
    sessions = make(requests=8_000, length_sigma=1.0, input_tokens=500)
    assert np.mean([s.turns[0].input_tokens for s in sessions]) == pytest.approx(500, rel=0.05)


def test_a_name_is_its_parts_mixed_in_one_after_the_other():
    golden, other_half = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
    name = np.zeros(1, dtype=np.uint64)
    for part in (2**62 - 5, 2, 0):
        name = mix(name * golden + np.uint64(part) + other_half)
    assert named(2**62 - 5, 2, 0) == int(name[0])
