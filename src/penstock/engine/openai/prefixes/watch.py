"""Asks another deployment for its prefix summaries, as often as for its load, and passes changes on as KV events."""

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlencode

import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError, ProtocolError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.types.kv import PrefixSummary
from penstock.engine.openai.apis.api import UNREADABLE
from penstock.engine.openai.connection import HttpConnection, NotThere
from penstock.engine.openai.prefixes.advertised import AdvertisedPrefixes

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
