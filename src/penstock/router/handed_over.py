"""A prompt that a prefill worker has computed, on its way to the worker that answers."""

from collections.abc import Callable

import msgspec

from penstock.core.ids import WorkerId
from penstock.core.types import KvHandle

_TTL_S_MIN = 0.001


class HandedOver:
    """Where its KV is, for as long as it is held there."""

    def __init__(
        self, handle: KvHandle | None, now_s: float, *, worker_id: WorkerId, give_up: Callable[[], None]
    ) -> None:
        """Take the handle that came this moment; None where the KV could not be kept.

        Args:
            handle: as it came.
            now_s: the loop's time.
            worker_id: the prefill worker, or what it was then.
            give_up: tells the prefill worker that nobody will fetch it.
        """
        self.worker_id = worker_id
        self.give_up = give_up
        self._handle = handle
        self._expires_s = now_s + (0.0 if handle is None else handle.ttl_s)

    @property
    def producer(self) -> WorkerId | None:
        """Who computed it; None where the KV could not be kept."""
        return None if self._handle is None else self._handle.producer

    def num_tokens(self, now_s: float) -> int:
        """Of the prompt, whose KV can be had."""
        handle = self.handle(now_s)
        return 0 if handle is None else handle.num_tokens

    def handle(self, now_s: float) -> KvHandle | None:
        """Give the handle with the time that is left of it."""
        left_s = self._expires_s - now_s
        if self._handle is None or left_s < _TTL_S_MIN:
            return None
        return msgspec.structs.replace(self._handle, ttl_s=left_s)
