"""The frames of one connection to a worker as its frontend decodes them: tokens of direct streams go to their clients from here."""

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from penstock.core.framing import Pong, UnknownFrame
from penstock.core.ids import RequestId
from penstock.core.wire import PackedTokens
from penstock.runtime.requests import direct_streams
from penstock.runtime.requests.outbox import CODEC, Frame
from penstock.seams import DirectClient, DirectStream, WrittenTokens

Grants = Sequence[tuple[RequestId, int]]
_NOTHING = Pong()
"""What a frame is without deltas: a message that a channel passes over."""


class DirectDeltas:
    """A codec, and the direct streams of one connection. One event loop owns it."""

    encode = staticmethod(CODEC.encode)

    def __init__(self, grant_tokens: int, written: Callable[[int, Grants], None]) -> None:
        """Begin without streams.

        Args:
            grant_tokens: so many tokens of a stream are granted at once.
            written: called after streams were written to, with how many tokens, and with grants that are due.
        """
        self._streams = direct_streams.DirectStreams(grant_tokens)
        self._written = written
        self._is_waiting = False

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: RequestId, stream: DirectStream, client: DirectClient) -> None:
        """As `Connection.open_direct`."""
        self._streams.open(request_id, cast("direct_streams.DirectStream", stream), client)

    def close(self, request_id: RequestId) -> WrittenTokens | None:
        """As `Connection.close_direct`, with the tokens that are still to be granted."""
        taken = self._streams.close(request_id)
        if taken is None:
            return None
        written, waiting, ungranted = taken
        return WrittenTokens(PackedTokens(written), PackedTokens(waiting), ungranted)

    def decode(self, payload: bytes) -> Frame | UnknownFrame:
        """Decode a frame without the deltas that direct streams take.

        Raises:
            ProtocolError: as `FrameCodec.decode`.
        """
        if not self._streams:
            return CODEC.decode(payload)
        rest = self._streams.feed(payload)
        if rest is None:
            return CODEC.decode(payload)
        if not self._is_waiting:
            self._is_waiting = True
            asyncio.get_running_loop().call_soon(self._flush)
        return CODEC.decode(rest) if rest else _NOTHING

    def _flush(self) -> None:
        self._is_waiting = False
        tokens, grants, failure = self._streams.flush(asyncio.get_running_loop().time())
        if tokens:
            self._written(tokens, grants)
        if failure is not None:
            raise failure
