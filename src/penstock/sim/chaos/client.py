"""A client that reads as those of a frontend do: tokens come to its transport by a rule wherever they may, and else to a sink."""

import asyncio
import json
from collections.abc import Iterable

from penstock.core.native import native
from penstock.core.types.requests import Delta
from penstock.core.wire import num_tokens, pack_tokens
from penstock.runtime.requests.direct_streams import DirectStream
from penstock.seams import DirectClient, Hold, Interrupt, RequestStream
from penstock.sim.chaos.invariants import StreamChecker

_TOKEN_BYTES = 8
_BUFFER_BYTES = 3 * _TOKEN_BYTES
"""With more unsent the client is behind."""


class _Decimals:
    """Decodes a token to its id and a space."""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)


class DirectReader(asyncio.WriteTransport):
    """A sink, a `DirectSink`, and the transport of its rule. Checks all tokens in the order in which they come."""

    def __init__(self, checker: StreamChecker, *, pause_s: float, leaves_after: int | None) -> None:
        """Make a client.

        Args:
            checker: sees what comes.
            pause_s: how long it reads nothing once it is behind; 0: it reads at once.
            leaves_after: it is gone after so many tokens; if they are even, its reader is cancelled, as that of a handler is.
        """
        super().__init__()
        self._checker = checker
        self._pause_s = pause_s
        self._leaves_after = leaves_after
        self._cancels = leaves_after is not None and leaves_after % 2 == 0
        self._task: asyncio.Task[None] | None = None
        self._unsent_bytes = 0
        decoder = (
            _Decimals()
            if native is None
            else native.ByteDecoder(native.TokenTable(lambda token_id: b"%d " % token_id))
        )
        self.rule = DirectStream(decoder, b"", b"", is_chunked=False)

    async def read(self, stream: RequestStream) -> None:
        """Read a stream to its end, or until the client leaves.

        Raises:
            PenstockError: the stream failed.
        """
        self._task = asyncio.current_task()
        try:
            await stream.run(self._take, self)
        except ConnectionResetError:
            assert self.is_closing(), "it was told of as gone, and is not"
        except asyncio.CancelledError:
            if not self._has_left or self._task is None or self._task.uncancel():
                raise

    def _take(self, delta: Delta) -> Hold | None:
        self._see(delta, _TOKEN_BYTES * num_tokens(delta.token_ids))
        if delta.finish_reason is None and self.is_closing():
            raise ConnectionResetError("the client is gone")
        return self._drain if self._unsent_bytes > _BUFFER_BYTES else None

    def _see(self, delta: Delta, num_bytes: int) -> None:
        self._checker.see(delta)
        if self._pause_s:
            self._unsent_bytes += num_bytes
        if self._cancels and self._has_left and self._task is not None and not self._task.cancelling():
            self._task.cancel()

    async def _drain(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._unsent_bytes = 0

    # -- DirectSink

    def open(self, interrupt: Interrupt) -> tuple[DirectStream, DirectClient]:
        gone = ConnectionResetError("the client is gone")
        return self.rule, DirectClient(
            self,
            _BUFFER_BYTES,
            lambda _gap_s: None,
            lambda is_gone: interrupt(gone if is_gone else self._drain),
        )

    # -- the transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        tokens = [int(token) for token in json.loads(bytes(data)).split()]
        request_id = self._checker.request.request_id
        self._see(Delta(request_id=request_id, token_ids=pack_tokens(tokens)), len(data))

    @property
    def _has_left(self) -> bool:
        return self._leaves_after is not None and self._checker.received >= self._leaves_after

    def is_closing(self) -> bool:
        return self._has_left and not self._cancels

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes
