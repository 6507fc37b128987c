"""Another region's prefix summaries, kept by router process and passed on as KV events of the link."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError, ProtocolError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent
from penstock.core.types.kv import PrefixSummary, blocks_per_chunk
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.engine.openai.apis.api import UNREADABLE
from penstock.engine.openai.connection import HttpConnection, NotThere

_HASH_BYTES = 8
ORIGINS_MAX = 64
"""Router processes of a region that are kept; the summaries of further ones do not count."""
CHUNKS_MAX = 131_072
"""Most chunks that one process may advertise."""
EXPIRES_S = 30.0
"""A summary expires so long after its process's last answer: each question of a link reaches a random process of its region."""


@dataclass(slots=True)
class _Origin:
    """The chunks that one router process advertises, up to `version`."""

    version: int
    heard_s: float
    chunks: set[int] = field(default_factory=set)


class AdvertisedPrefixes:
    """Keeps the advertised chunks. One task owns it.

    It never has a chunk that was not advertised, that was withdrawn, or that is of another hash key, block size or model.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        """Know nothing yet.

        Args:
            root: parent of every first block hash here, 16 bytes.
            block_size: tokens of a block.
        """
        self.root = root
        self._chunk_tokens = blocks_per_chunk(block_size) * block_size
        self._origins: dict[int, _Origin] = {}
        self._claims: Counter[int] = Counter()  # number of processes that advertise each chunk

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._claims

    @property
    def after(self) -> Mapping[int, int]:
        """The last version known of each process."""
        return {origin: known.version for origin, known in self._origins.items()}

    def take(self, summary: PrefixSummary, now_s: float) -> Sequence[KvEvent]:
        """Take in an answer; give the events.

        Args:
            summary: of one process.
            now_s: the event loop's time.

        Raises:
            ProtocolError: the summary cannot be used; the caller then calls `forget` for its process.
        """
        self._check(summary)
        known = self._origins.get(summary.origin)
        if known is None:
            if len(self._origins) >= ORIGINS_MAX:
                raise ProtocolError(
                    f"more than {ORIGINS_MAX} routers of the region tell prefixes; this one does not count"
                )
            known = _Origin(0, now_s)
        if summary.since not in {0, known.version}:
            raise ProtocolError(
                f"changes after version {summary.since} of a router's prefixes, expected those after {known.version} or all"
            )
        added = set(unpack_hashes(summary.added).tolist())
        removed = set(unpack_hashes(summary.removed).tolist())
        new = added - known.chunks
        gone = known.chunks - added if summary.since == 0 else (removed & known.chunks) - added
        if len(known.chunks) + len(new) - len(gone) > CHUNKS_MAX:
            raise ProtocolError(f"more than {CHUNKS_MAX} chunks of one router")
        self._origins[summary.origin] = known
        events = self._change(known, new, gone)
        known.version, known.heard_s = summary.version, now_s
        return events

    def expire(self, now_s: float) -> Sequence[KvEvent]:
        """Forget the chunks of processes that have been silent for `EXPIRES_S`; give the events."""
        silent = [origin for origin, known in self._origins.items() if now_s - known.heard_s > EXPIRES_S]
        return [event for origin in silent for event in self.forget(origin)]

    def forget(self, origin: int) -> Sequence[KvEvent]:
        """Forget the chunks of one process; give the events."""
        known = self._origins.pop(origin, None)
        return () if known is None else self._change(known, set(), known.chunks.copy())

    def clear(self) -> Sequence[KvEvent]:
        """Forget everything; give the events."""
        return [event for origin in tuple(self._origins) for event in self.forget(origin)]

    def check(self) -> None:
        """Raise AssertionError where a count or bound is wrong."""
        assert len(self._origins) <= ORIGINS_MAX, f"{len(self._origins)} processes: past the bound"
        counts = Counter(chunk for known in self._origins.values() for chunk in known.chunks)
        assert counts == self._claims, "claims: summed over the processes"
        for known in self._origins.values():
            assert len(known.chunks) <= CHUNKS_MAX, f"{len(known.chunks)} chunks: past the bound"

    def _check(self, summary: PrefixSummary) -> None:
        if summary.root != self.root:
            raise ProtocolError(
                "its block hashes are others: give both regions the same secret (PENSTOCK_SECRET), name, model and block_size,"
                " and the link's API key no cache_salt of its own"
            )
        if summary.chunk_tokens != self._chunk_tokens:
            raise ProtocolError(
                f"it tells chunks of {summary.chunk_tokens} tokens, expected {self._chunk_tokens}; update the older region"
            )
        if len(summary.added) % _HASH_BYTES or len(summary.removed) % _HASH_BYTES:
            raise ProtocolError("hashes are 8 bytes each; the answer ends within one")
        if not 0 <= summary.since <= summary.version:
            raise ProtocolError(f"changes from version {summary.since} to {summary.version}")
        if (len(summary.added) + len(summary.removed)) // _HASH_BYTES > CHUNKS_MAX:
            raise ProtocolError(f"more than {CHUNKS_MAX} changes in one answer")

    def _change(self, known: _Origin, new: set[int], gone: set[int]) -> Sequence[KvEvent]:
        """Change the chunks of a process; give events for chunks that its first process adds or its last one drops."""
        known.chunks |= new
        known.chunks -= gone
        left = [chunk for chunk in gone if self._claims[chunk] == 1]
        come = [chunk for chunk in new if chunk not in self._claims]
        self._claims.update(new)
        self._claims.subtract(gone)
        for chunk in left:
            del self._claims[chunk]
        events: list[KvEvent] = []
        if left:
            events.append(BlockRemoved(block_hashes=pack_hashes(left)))
        if come:
            size = self._chunk_tokens
            events.append(
                BlockStored(block_hashes=pack_hashes(come), parent_block_hash=None, block_size=size)
            )
        return events


_UNADVERTISED_PAUSE_S = 10.0
"""Pause after an answer without a usable summary."""
_BYTES_MAX = 1 << 20
"""Of an answer: room for the chunks that one router may advertise."""
_log = get_logger()
_summaries = msgspec.msgpack.Decoder(PrefixSummary)


class PrefixWatch:
    """Keeps a region's advertised prefixes up to date. One task runs it."""

    def __init__(
        self,
        advertised: AdvertisedPrefixes,
        connection: HttpConnection,
        model: str,
        *,
        interval_s: float,
        timeout_s: float,
        on_events: Callable[[Sequence[KvEvent]], None],
    ) -> None:
        """Ask nothing yet.

        Args:
            advertised: the prefixes so far.
            connection: to the other side.
            model: its name there.
            interval_s: between two questions.
            timeout_s: longest wait for an answer.
            on_events: called with the changes of what is held there.
        """
        self._advertised = advertised
        self._connection = connection
        self._model = model
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._on_events = on_events
        self.problem = ""
        """Why the latest answer was not used; empty where it was."""
        self._times_forgotten = 0
        self.advertised_at_s = 0.0
        """Time of the last usable summary, in seconds since 1970; 0: never."""

    @property
    def num_chunks(self) -> int:
        """Chunks that the other side advertises."""
        return len(self._advertised)

    def forget(self) -> None:
        """Forget everything: the region is lost, and may come back with empty caches."""
        self._times_forgotten += 1
        self._pass_on(self._advertised.clear())

    async def run(self) -> None:
        """Ask until cancelled."""
        loop = asyncio.get_running_loop()
        asked_s, pause_s = loop.time(), self._interval_s
        while True:
            await asyncio.sleep(pause_s)
            now_s = loop.time()
            passed_s, asked_s, pause_s = now_s - asked_s, now_s, self._interval_s
            forgotten = self._times_forgotten
            try:
                summary = await self._ask(passed_s)
            except PenstockError:  # health checks say what is wrong
                summary = None
            else:
                is_stale = forgotten != self._times_forgotten
                if not is_stale and (summary is None or not self._take(summary)):
                    pause_s = _UNADVERTISED_PAUSE_S
            self._pass_on(self._advertised.expire(loop.time()))

    async def _ask(self, passed_s: float) -> PrefixSummary | None:
        """Ask for the changes, with a byte budget for `passed_s` seconds; None where the other side has no summaries.

        Raises:
            Unavailable: there is no answer, or something else.
        """
        after = ",".join(f"{origin}-{version}" for origin, version in self._advertised.after.items())
        asked = {
            "model": self._model,
            "interval_s": f"{passed_s:.3f}",
            "after": after,
            "root": self._advertised.root.hex(),
        }
        query = urlencode(asked)
        try:
            content = await self._connection.get(
                f"/prefixes?{query}", timeout_s=self._timeout_s, bytes_max=_BYTES_MAX
            )
            return _summaries.decode(content)
        except NotThere:
            return None
        except UNREADABLE as error:
            raise Unavailable(
                f"{self._connection.name}: /prefixes: no summary of prefixes ({error})"
            ) from error

    def _take(self, summary: PrefixSummary) -> bool:
        """Take an answer in; give whether it could be used."""
        try:
            self._pass_on(self._advertised.take(summary, asyncio.get_running_loop().time()))
        except ProtocolError as error:
            self._pass_on(self._advertised.forget(summary.origin))
            if error.message != self.problem:
                self.problem = error.message
                _log.warning("prefixes_unused", server=self._connection.name, reason=error.message)
            return False
        self.advertised_at_s = wall_time_s()
        if self.problem:
            self.problem = ""
            _log.info("prefixes_used", server=self._connection.name)
        return True

    def _pass_on(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._on_events(events)
