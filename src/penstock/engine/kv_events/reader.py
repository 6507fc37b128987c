"""Reads the messages of one engine, of vLLM's and SGLang's form, into Penstock's KV events."""

from collections.abc import Iterator

from penstock.core.errors import ProtocolError
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.engine.kv_events.decoder import EventDecoder
from penstock.engine.kv_events.engine_events import Omission, Omissions
from penstock.engine.kv_events.translator import KvEventTranslator, SaltOf

_TOLD = (
    Omission.UNKNOWN_TYPE, Omission.MEDIUM, Omission.UNKNOWN_PARENT, Omission.CONTRADICTION, Omission.FULL,
)  # fmt: skip
"""Omissions to warn about: routers know fewer blocks than the engine has."""
_log = get_logger()


class EventReader:
    """Decodes and translates messages, and warns of what it leaves out. One task owns it."""

    def __init__(
        self, endpoint: str, *, block_size: int, salt_of: SaltOf, hash_key: bytes = DEFAULT_KEY
    ) -> None:
        """Make a reader.

        Args:
            endpoint: where the messages come from, for the log.
            block_size: tokens in a block.
            salt_of: finds a prompt's salt, such as `HexSalts`.
            hash_key: the deployment's.
        """
        self.omissions: Omissions = Omissions()
        self._endpoint = endpoint
        self._decoder = EventDecoder(block_size, self.omissions)
        self._translator = KvEventTranslator(
            block_size=block_size, salt_of=salt_of, omissions=self.omissions, hash_key=hash_key
        )
        self._warn_at = 1
        """Warn at so many omissions: the first, then each ten times as many."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the engine is known to hold."""
        return len(self._translator)

    def read(self, payload: bytes) -> Iterator[list[KvEvent]]:
        """Read a message, a part at a time; one that is malformed clears all blocks, since it may have told of removals."""
        try:
            for events in self._decoder.decode(payload):
                yield self._translator.translate(events)
        except ProtocolError as error:
            self.malformed(error.message)
            yield self.clear()
        told = {str(why): count for why in _TOLD if (count := self.omissions[why])}
        if told and (total := sum(told.values())) >= self._warn_at:
            self._warn_at = 10 * total
            _log.warning("kv_events_left_out", endpoint=self._endpoint, **told)

    def clear(self) -> list[KvEvent]:
        """Forget all blocks, after events were lost."""
        return self._translator.clear()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._translator.check()

    def malformed(self, reason: str) -> None:
        """Count and log a message that cannot be read."""
        if self.noted(Omission.MALFORMED):
            _log.warning("kv_event_message_malformed", endpoint=self._endpoint, reason=reason)

    def noted(self, why: Omission) -> bool:
        """Count one, and say whether to log it: the first ten, then the 100th, the 1000th and so on."""
        self.omissions[why] += 1
        count = self.omissions[why]
        return count <= 10 or str(count).rstrip("0") == "1"
