"""A link asks for prefixes: what it makes of answers that fit, of hostile ones, and of none."""

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from penstock.core import wire
from penstock.core.errors import ProtocolError, Unavailable
from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent
from penstock.core.types.kv import PrefixSummary
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.engine.openai.connection import NotThere
from penstock.engine.openai.prefixes import (
    CHUNKS_MAX,
    EXPIRES_S,
    ORIGINS_MAX,
    AdvertisedPrefixes,
    PrefixWatch,
)
from penstock.sim.loop import run_virtual

ROOT = bytes(range(16))
Answer = bytes | Exception | Callable[[], bytes]


def summary(
    origin: int = 1, since: int = 0, version: int = 1, added: Sequence[int] = (), **fields: object
) -> bytes:
    known = {"root": ROOT, "chunk_tokens": 256, "added": pack_hashes(added)} | fields
    return wire.encode(PrefixSummary(origin=origin, since=since, version=version, **known))


class Scripted:
    """A connection that gives one answer after the other, and then none."""

    name = "region eu"

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, list[str]]] = []

    async def get(self, path: str, *, timeout_s: float, bytes_max: int | None = None) -> bytes:
        assert timeout_s == 1.0
        assert bytes_max == 1 << 20
        assert urlsplit(path).path == "/prefixes"
        self.asked.append(parse_qs(urlsplit(path).query, keep_blank_values=True))
        answer = self.answers.pop(0) if self.answers else Unavailable("away")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, bytes) else answer()


class Scene:
    """A watch over a scripted connection, and the chunks that its events say are held."""

    def __init__(self, *answers: Answer) -> None:
        self.connection = Scripted(*answers)
        self.told = AdvertisedPrefixes(ROOT, 16)
        self.held: set[int] = set()
        self.watch = PrefixWatch(
            self.told, self.connection, "tiny", interval_s=0.5, timeout_s=1.0, on_events=self.apply
        )

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert event.block_size == 256
                    self.held |= {*unpack_hashes(event.block_hashes).tolist()}
                case BlockRemoved():
                    self.held -= {*unpack_hashes(event.block_hashes).tolist()}

    def run(self, seconds: float) -> None:
        async def main() -> None:
            task = asyncio.get_running_loop().create_task(self.watch.run())
            await asyncio.sleep(seconds)
            task.cancel()

        run_virtual(main())
        self.told.check()
        assert len(self.told) == len(self.held)


def test_it_asks_for_what_it_lacks_of_each_router() -> None:
    scene = Scene(
        summary(1, 0, 3, [10, 11]),
        summary(2, 0, 9, [11, 12]),
        summary(1, 3, 5, [13], removed=pack_hashes([11])),
    )
    scene.run(2.1)
    assert scene.held == {10, 11, 12, 13}, "11 is held as long as one router says so"
    asked = scene.connection.asked
    assert [each["after"] for each in asked] == [[""], ["1-3"], ["1-3,2-9"], ["1-5,2-9"]]
    assert {each["model"][0] for each in asked} == {"tiny"}
    assert [float(each["interval_s"][0]) for each in asked] == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(
    "hostile",
    [
        b"",
        b"\xc1",
        b"{}",
        wire.encode({"origin": "x"}),
        summary(added=[7], root=bytes(16)),
        summary(added=[7], chunk_tokens=16),
        summary(added=[7], since=1, version=2),
        summary(added=[7], since=2, version=1),
        summary(added=[7], since=-1),
        summary(added=range(CHUNKS_MAX + 1)),
        wire.encode(PrefixSummary(origin=1, root=ROOT, chunk_tokens=256, since=0, version=1, added=b"odd")),
        NotThere("404"),
        Unavailable("1048577 bytes"),
    ],
)
def test_nothing_is_believed_that_cannot_be_used(hostile: Answer) -> None:
    scene = Scene(hostile, summary(2, 0, 1, [5]))
    scene.run(11.0)
    assert scene.held == {5}, "and the next answer counts"


def test_routers_beyond_the_bound_do_not_count() -> None:
    told = AdvertisedPrefixes(ROOT, 16)
    decode = msgspec.msgpack.Decoder(PrefixSummary).decode
    for origin in range(ORIGINS_MAX):
        told.take(decode(summary(origin, 0, 1, [origin])), 0.0)
    with pytest.raises(ProtocolError, match="does not count"):
        told.take(decode(summary(900, 0, 1, [900])), 0.0)
    assert len(told) == ORIGINS_MAX
    assert 900 not in told
    told.expire(EXPIRES_S + 1)
    told.take(decode(summary(900, 0, 1, [900])), 0.0)
    assert 900 in told


def test_an_answer_to_what_was_asked_before_it_was_all_forgotten_does_not_count() -> None:
    def late() -> bytes:
        scene.watch.forget()
        return summary(1, 3, 4, [6])

    scene = Scene(summary(1, 0, 3, [5]), late, summary(1, 0, 4, [5, 6]))
    scene.run(1.1)
    assert not scene.held
    again = Scene(
        summary(1, 0, 3, [5]),
        lambda: (again.watch.forget(), summary(1, 3, 4, [6]))[1],
        summary(1, 0, 4, [5, 6]),
    )
    again.run(1.6)
    assert again.held == {5, 6}
    assert again.connection.asked[-1]["after"] == [""]
