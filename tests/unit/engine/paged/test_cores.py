"""Where an engine's threads run. Each case has a thread of its own: what it is kept to ends with it."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.paged.memory import keep_to_cores

CORES = sorted(os.sched_getaffinity(0))


def in_a_thread(function):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def kept_to(device, threads):
    def keep():
        keep_to_cores(device, threads)
        return sorted(os.sched_getaffinity(0))

    return in_a_thread(keep)


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_others_run_where_they_like(device):
    assert kept_to(device, 1) == CORES


def test_each_has_cores_of_its_own():
    assert [kept_to(f"cpu:{core}", 1) for core in CORES] == [[core] for core in CORES]
    if list(range(CORES[0], CORES[-1] + 1)) == CORES:
        assert kept_to(f"cpu:{CORES[0]}", len(CORES)) == CORES
    assert sorted(os.sched_getaffinity(0)) == CORES, "only the thread that asks is kept"


def test_cores_that_the_process_may_not_use():
    def keep():
        os.sched_setaffinity(0, CORES[:1])
        keep_to_cores(f"cpu:{CORES[0]}", 2)

    with pytest.raises(ConfigError) as raised:
        in_a_thread(keep)
    assert (
        f"device: cpu:{CORES[0]}: with 2 threads it needs core {CORES[0] + 1}, and this process may use core {CORES[0]};"
        in raised.value.message
    )
    assert sorted(os.sched_getaffinity(0)) == CORES
