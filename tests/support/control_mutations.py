"""Control messages with errors in them, seeded."""

import asyncio
import contextlib
import random
from pathlib import Path

import msgspec

from penstock.core.types.instances import Role
from penstock.deploy.control.messages import (
    LINE_BYTES_MAX,
    Add,
    ControlRequest,
    Flip,
    GetObservation,
    GetScale,
    Retire,
)

OLD = -1
"""A revision that no deployment has: what such a request asks for is refused."""
REQUESTS = [
    ControlRequest(version=1, body=body)
    for body in (
        GetScale(after=3),
        GetObservation(seconds=10.0),
        Add(role=Role.DECODE, count=1, by="somebody", revision=OLD),
        Retire(names=("decode-1",), by="somebody", revision=OLD),
        Flip(name="prefill-1", role=Role.DECODE, by="somebody", revision=OLD),
    )
]
VALUES = [
    "-1",
    "0",
    "1e400",
    "null",
    "[]",
    "{}",
    '"\\u0000"',
    "9" * 40,
    '"' + "x" * 300 + '"',
    "true",
    "1e-9",
]


def mutated(rng: random.Random) -> bytes:
    """Make a control message with one to three errors in it; some are requests all the same."""
    line = msgspec.json.encode(rng.choice(REQUESTS))
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(5)
        place = rng.randrange(len(line)) if line else 0
        if kind == 0:
            line = line[:place] + bytes([rng.randrange(256)]) + line[place + 1 :]
        elif kind == 1:
            line = line[:place] + line[place + rng.randint(1, 8) :]
        elif kind == 2:
            line = line[:place] + line[place : place + 20] * rng.randint(2, 50) + line[place:]
        elif kind == 3:
            parts = line.split(b":")
            number = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
            parts[number] = rng.choice(VALUES).encode() + b"," + parts[number].partition(b",")[2]
            line = b":".join(parts)
        else:
            line = line[:place]
    return line.replace(b"\n", b" ") + b"\n"


async def answer_to(path: Path, line: bytes) -> bytes:
    """Send a message; returns the answer, empty if there is none."""
    reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
    writer.write(line)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    try:
        async with asyncio.timeout(30):
            return await reader.read(1 << 22)
    finally:
        writer.close()
