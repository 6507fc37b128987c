"""KV events of TensorRT-LLM, which tell tokens but no salts: the requests say which salt a prompt has."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.wire import pack_tokens
from penstock.engine.kv_events.engine_events import EngineEvent, EngineStored, Omissions
from penstock.engine.kv_events.polled import PolledEvents
from penstock.engine.kv_events.translator import HexSalts, KvEventTranslator
from penstock.engine.spec import EngineSpec

_PROMPTS_MAX = 16_384
_log = get_logger()


class PolledCache:
    """Translates polled events of all data-parallel ranks.

    The first block of a prompt is looked up among recent requests: equal first blocks with different salts at the same
    time may be taken for each other. A router then expects blocks that are not there, or misses some.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.omissions: Omissions = Omissions()
        self._block_size = spec.block_size
        self._salts: OrderedDict[bytes, str | None] = OrderedDict()
        several = spec.data_parallel > 1
        self._readers = [
            PolledEvents(spec.block_size, self.omissions, rank if several else None)
            for rank in range(spec.data_parallel)
        ]
        self._translators = [
            KvEventTranslator(
                block_size=spec.block_size,
                salt_of=HexSalts(default=spec.card.salt if spec.card is not None else b""),
                omissions=self.omissions,
                hash_key=spec.hash_key,
            )
            for _ in self._readers
        ]

    def expect(self, token_ids: Sequence[int], salt: str | None) -> None:
        """Note the salt of a prompt that is about to be computed."""
        if len(token_ids) < self._block_size:
            return
        first = pack_tokens(token_ids[: self._block_size])
        self._salts[first] = salt
        self._salts.move_to_end(first)
        if len(self._salts) > _PROMPTS_MAX:
            self._salts.popitem(last=False)

    def translate(self, polled: Sequence[Mapping[str, Any]]) -> list[tuple[int, Sequence[KvEvent]]]:
        """Translate events as they were polled: (data-parallel rank, its events), without those that have none."""
        out: list[tuple[int, Sequence[KvEvent]]] = []
        before = sum(self.omissions.values())
        for rank, (reader, translator) in enumerate(zip(self._readers, self._translators, strict=True)):
            if events := translator.translate(self._salted(reader.read(polled))):
                out.append((rank, events))
        if sum(self.omissions.values()) > before:
            _log.debug(
                "kv_events_omitted",
                engine="trtllm",
                **{str(why): count for why, count in self.omissions.items()},
            )
        return out

    def _salted(self, events: Iterable[EngineEvent]) -> Iterable[EngineEvent]:
        for event in events:
            if isinstance(event, EngineStored) and event.parent is None and event.token_ids:
                salt = self._salts.get(event.token_ids[: 4 * self._block_size])
                yield event if salt is None else msgspec.structs.replace(event, cache_salt=salt)
            else:
                yield event
