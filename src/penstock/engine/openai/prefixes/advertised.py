"""The chunks that a region advertises in its routers' summaries, and their changes as KV events for this region's routers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.core.errors import ProtocolError
from penstock.core.types.events import BlockRemoved, BlockStored, KvEvent
from penstock.core.types.kv import PrefixSummary, blocks_per_chunk
from penstock.core.wire import pack_hashes, unpack_hashes

_HASH_BYTES = 8
ORIGINS_MAX = 64
"""Router processes of a region that are kept; the summaries of further ones do not count."""
CHUNKS_MAX = 131_072
"""Most chunks that one process may advertise."""
EXPIRES_S = 30.0
"""A summary expires so long after its process's last answer: each question of a link reaches a random process of its region."""


@dataclass(slots=True)
class _Origin:
    """What one router process advertises, up to `version`."""

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
