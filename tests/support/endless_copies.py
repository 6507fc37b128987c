"""Copies that end only when they are stopped, for tests that interrupt a transfer at any speed of the machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from unittest import mock

from penstock.testing.transports.harness import TwoAgents
from penstock.transfer.regions import copies
from penstock.transfer.regions.ranges import Numbers, Stop, copy_ranges

_GIVE_UP_S = 10.0
"""A transport that never stops a copy fails the test instead of hanging it."""


class EndlessCopies(TwoAgents):
    """Two agents over a transport that copies mapped memory, such as `memory`, or `shm` between arenas."""

    @contextmanager
    def endless_transfers(self) -> Iterator[None]:
        with mock.patch.object(copies, "copy_ranges", _copy_until_stopped):
            yield


def _copy_until_stopped(
    targets: Numbers, sources: Numbers, lengths: Numbers, threads: int, stop: Stop
) -> None:
    give_up_s = monotonic() + _GIVE_UP_S
    while not stop[0] and monotonic() < give_up_s:
        copy_ranges(targets, sources, lengths, threads, stop)
