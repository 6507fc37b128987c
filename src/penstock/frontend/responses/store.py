"""Conversations that later requests may continue by an answer's id, up to a number of bytes."""

import heapq
from collections import OrderedDict

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.client_fields import ClientFields
from penstock.frontend.openai.bodies import ChatRequest, Message
from penstock.frontend.openai.dialect import ParsedBody

ENTRY_BYTES = 400
"""Memory that a conversation takes beside its messages (CPython 3.11)."""
_STALE = 64
"""Stale entries of the heap that are left in it, beside one a tenant."""
_decode = msgspec.msgpack.Decoder(list[Message]).decode
_encode = msgspec.msgpack.Encoder().encode


class _Kept:
    """One tenant's conversations, the least recently used first."""

    __slots__ = ("messages", "size_bytes")

    def __init__(self) -> None:
        self.messages: OrderedDict[str, bytes] = OrderedDict()
        self.size_bytes = 0

    def put(self, response_id: str, messages: bytes) -> int:
        """Keep messages; give by how many bytes there are more."""
        before = self.messages.pop(response_id, None)
        more = len(messages) + ENTRY_BYTES - (0 if before is None else len(before) + ENTRY_BYTES)
        self.messages[response_id] = messages
        self.size_bytes += more
        return more

    def drop_oldest(self) -> int:
        """Drop one; give its bytes."""
        _, dropped = self.messages.popitem(last=False)
        self.size_bytes -= len(dropped) + ENTRY_BYTES
        return len(dropped) + ENTRY_BYTES


class ResponseStore:
    """Keeps the messages up to and with an answer, each for its tenant. One event loop owns it.

    Where they are too many, the tenant with the most bytes loses its oldest: no tenant pushes out another one that holds less.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._of: dict[str, _Kept] = {}
        self._largest: list[tuple[int, str]] = []
        """Heap of (-bytes, tenant); an entry of another size than its tenant's is stale."""

    def put(self, tenant: str, response_id: str, messages: bytes) -> None:
        """Keep encoded messages; a conversation larger than the whole store is not kept."""
        if len(messages) + ENTRY_BYTES > self._bytes_max:
            return
        kept = self._of.get(tenant)
        if kept is None:
            kept = self._of[tenant] = _Kept()
        self._bytes += kept.put(response_id, messages)
        if len(self._largest) >= 2 * len(self._of) + _STALE:
            self._largest = [(-other.size_bytes, name) for name, other in self._of.items()]
            heapq.heapify(self._largest)
        else:
            heapq.heappush(self._largest, (-kept.size_bytes, tenant))
        while self._bytes > self._bytes_max:
            self._drop_one()

    def _drop_one(self) -> None:
        size_bytes, tenant = self._largest[0]
        kept = self._of.get(tenant)
        if kept is None or kept.size_bytes != -size_bytes:
            heapq.heappop(self._largest)
            return
        self._bytes -= kept.drop_oldest()
        if kept.messages:
            heapq.heapreplace(self._largest, (-kept.size_bytes, tenant))
        else:
            heapq.heappop(self._largest)
            del self._of[tenant]

    def get(self, tenant: str, response_id: str) -> bytes:
        """Give the encoded messages of a conversation.

        Raises:
            RequestError: it is not kept, or is another tenant's (404).
        """
        kept = self._of.get(tenant)
        if kept is None or response_id not in kept.messages:
            raise RequestError(
                f"previous_response_id: {response_id[:80]!r} is not kept here: it was sent with store: false, is too old"
                f" (frontend.responses_bytes_max is {self._bytes_max}), or another frontend process answered it; send the whole"
                " conversation as input",
                param="previous_response_id",
                http_status=404,
            )
        kept.messages.move_to_end(response_id)
        return kept.messages[response_id]

    def check(self) -> None:
        """Raise AssertionError where the parts disagree, or it is past its bound."""
        assert self._bytes <= self._bytes_max, f"{self._bytes} of {self._bytes_max}"
        assert self._bytes == sum(kept.size_bytes for kept in self._of.values())
        found = {(-kept.size_bytes, tenant) for tenant, kept in self._of.items()}
        assert found <= set(self._largest), "each tenant stands in the heap with its size"
        for kept in self._of.values():
            assert kept.messages
            assert kept.size_bytes == sum(len(each) + ENTRY_BYTES for each in kept.messages.values())


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


def fields_after(parsed: ParsedBody) -> ClientFields:
    """Give the names of a body's fields, once `stored_messages` may have put a conversation before them."""
    if not parsed.fields.messages or not isinstance(parsed.request, ChatRequest):
        return parsed.fields
    history = len(parsed.request.messages) - len(parsed.fields.messages)
    return parsed.fields.after(parsed.instructions, history) if history else parsed.fields


def with_answer(messages: bytes, answer: Message) -> bytes:
    """Add an answer to encoded messages."""
    return _encode([*_decode(messages), answer])
