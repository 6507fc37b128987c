"""Requests for checksums that a peer must not send."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.descriptors import Descriptors
from penstock.core.errors import ProtocolError
from penstock.core.wire import encode
from penstock.transfer.transports.sums import RANGES_MAX, SumRanges, answer_sums


def payload_of(count: int) -> bytes:
    column = np.zeros(count, np.uint64)
    return encode(SumRanges.of(Descriptors(column, column, column)))


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (payload_of(RANGES_MAX + 1), f"{RANGES_MAX + 1} ranges for checksums in one message"),
        (
            encode(SumRanges(region_ids=bytes(8), offsets=bytes(16), lengths=bytes(8))),
            "columns of 8, 16 and 8",
        ),
        (b"\xc1", "a message of 1 bytes for checksums"),
    ],
)
def test_a_malformed_request_is_refused_before_memory_is_read(payload: bytes, says: str) -> None:
    link: Any = SimpleNamespace(peer="p")
    host: Any = None
    with pytest.raises(ProtocolError, match=says):
        asyncio.run(answer_sums(host, link, {}, payload, None))
