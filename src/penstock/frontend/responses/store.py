"""Conversations that later requests may continue by an answer's id, up to a number of bytes."""

from collections import OrderedDict

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest, Message
from penstock.frontend.openai.dialect import ParsedBody

ENTRY_BYTES = 400
"""Memory that a conversation takes beside its messages (CPython 3.11)."""
_decode = msgspec.msgpack.Decoder(list[Message]).decode
_encode = msgspec.msgpack.Encoder().encode


class ResponseStore:
    """Keeps the messages up to and with an answer, each for its tenant; the oldest go first. One event loop owns it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def put(self, tenant: str, response_id: str, messages: bytes) -> None:
        """Keep encoded messages; a conversation larger than the whole store is not kept."""
        if len(messages) + ENTRY_BYTES > self._bytes_max:
            return
        before = self._kept.pop((tenant, response_id), None)
        self._bytes += len(messages) + ENTRY_BYTES - (0 if before is None else len(before) + ENTRY_BYTES)
        self._kept[tenant, response_id] = messages
        while self._bytes > self._bytes_max:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped) + ENTRY_BYTES

    def get(self, tenant: str, response_id: str) -> bytes:
        """Give the encoded messages of a conversation.

        Raises:
            RequestError: it is not kept, or is another tenant's (404).
        """
        kept = self._kept.get((tenant, response_id))
        if kept is None:
            raise RequestError(
                f"previous_response_id: {response_id[:80]!r} is not kept here: it was sent with store: false, is too old"
                f" (frontend.responses_bytes_max is {self._bytes_max}), or another frontend process answered it; send the whole"
                " conversation as input",
                param="previous_response_id",
                http_status=404,
            )
        self._kept.move_to_end((tenant, response_id))
        return kept


def stored_messages(parsed: ParsedBody, history: bytes) -> bytes | None:
    """Put a conversation before the messages of a body that continues it; gives what to store of both, encoded, if anything."""
    request = parsed.request
    if not isinstance(request, ChatRequest):
        return None
    head, said = request.messages[: parsed.instructions], request.messages[parsed.instructions :]
    if history:
        said = [*_decode(history), *said]
        request.messages = [*head, *said]
    return _encode(said) if parsed.stores else None


def with_answer(messages: bytes, answer: Message) -> bytes:
    """Add an answer to encoded messages."""
    return _encode([*_decode(messages), answer])
