"""Conversations that later requests continue by an answer's id, and which of their oldest messages fit the model."""

import hashlib
import heapq
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.log import get_logger
from penstock.core.wire import Wire, encode
from penstock.frontend.apis.bodies import ChatRequest, Message
from penstock.frontend.apis.checks import wrong
from penstock.frontend.apis.decoding import without_half_pairs
from penstock.frontend.apis.dialect import ParsedBody

ENTRY_BYTES = 400
"""Memory that a conversation takes beside its messages (CPython 3.11)."""
_STALE = 64
"""Stale entries of the heap that are left in it, beside one a tenant."""
_decode = msgspec.msgpack.Decoder(list[Message]).decode
_encode = msgspec.msgpack.Encoder().encode
_REFERENCE = b"item_reference"
_ITEM_ID = re.compile("[a-z]+_([0-9a-f]{24})[0-9]+")
_log = get_logger()


class KeptResponse(Wire, frozen=True):
    """An answer: the encoded messages up to and with it, and its response object as JSON."""

    messages: bytes
    response: bytes


_decode_kept = msgspec.msgpack.Decoder(KeptResponse).decode


def kept_response(kept: bytes) -> KeptResponse:
    """Decode what `kept_bytes` has made."""
    return _decode_kept(kept)


def kept_bytes(messages: bytes, answer: Message, response: bytes) -> bytes:
    """Encode an answer for the store: the encoded messages before it, its message, and its response object."""
    return encode(KeptResponse(messages=_encode([*_decode(messages), answer]), response=response))


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

    def drop(self, response_id: str) -> int:
        """Drop one; give its bytes."""
        size_bytes = len(self.messages.pop(response_id)) + ENTRY_BYTES
        self.size_bytes -= size_bytes
        return size_bytes


class SharedResponses:
    """Files of what the frontend processes of one port keep: each finds there what another one has answered.

    Each process writes and drops its own files, in a directory of its own; any may remove a conversation for all.
    """

    def __init__(self, directory: Path, process: str) -> None:
        """Remove the files that an earlier process of this name has left."""
        self._directory = directory
        self._own = directory / process
        shutil.rmtree(self._own, ignore_errors=True)
        self._own.mkdir(parents=True)

    def write(self, tenant: str, response_id: str, messages: bytes) -> None:
        """Write what this process keeps. Without room on the disk other processes do not find it."""
        path = self._own / _file_name(tenant, response_id)
        part = path.with_suffix(".part")
        try:
            part.write_bytes(messages)
            part.rename(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            _log.warning("response_not_shared", path=str(path), error=str(error))

    def drop(self, tenant: str, response_id: str) -> None:
        """Remove the file of this process, if there is one."""
        (self._own / _file_name(tenant, response_id)).unlink(missing_ok=True)

    def find(self, tenant: str, response_id: str) -> bytes | None:
        """Give what any process keeps; None where none does."""
        for path in self._paths(tenant, response_id):
            try:
                return path.read_bytes()
            except OSError:  # dropped meanwhile
                continue
        return None

    def remove(self, tenant: str, response_id: str) -> bool:
        """Remove the files of all processes; False where there are none."""
        paths = list(self._paths(tenant, response_id))
        for path in paths:
            path.unlink(missing_ok=True)
        return bool(paths)

    def _paths(self, tenant: str, response_id: str) -> Iterator[Path]:
        name = _file_name(tenant, response_id)
        yield from (path for each in self._directory.iterdir() if (path := each / name).is_file())


def _file_name(tenant: str, response_id: str) -> str:
    """Name a file by a digest: clients choose both names."""
    return hashlib.sha256(f"{tenant}\0{response_id}".encode()).hexdigest()


class ResponseStore:
    """Keeps the messages up to and with an answer, each for its tenant. One event loop owns it.

    Where they are too many, the tenant with the most bytes loses its oldest: no tenant pushes out another one that holds less.
    """

    def __init__(self, bytes_max: int, shared: SharedResponses | None = None) -> None:
        """Begin empty.

        Args:
            bytes_max: that this process keeps.
            shared: with the other processes of the port; None: there is no other.
        """
        self._shared = shared
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
        if self._shared is not None:
            self._shared.write(tenant, response_id, messages)
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
        oldest = next(iter(kept.messages))
        if self._shared is not None:
            self._shared.drop(tenant, oldest)
        self._bytes -= kept.drop(oldest)
        if kept.messages:
            heapq.heapreplace(self._largest, (-kept.size_bytes, tenant))
        else:
            heapq.heappop(self._largest)
            del self._of[tenant]

    def get(self, tenant: str, response_id: str, param: str = "previous_response_id") -> bytes:
        """Give what is kept of an answer.

        Args:
            tenant: whose it is.
            response_id: the answer's id.
            param: the client's field of the id, for the error.

        Raises:
            RequestError: it is not kept, or is another tenant's (404).
        """
        if self._shared is not None:
            found = self._shared.find(tenant, response_id)
        else:
            kept = self._of.get(tenant)
            found = None if kept is None else kept.messages.get(response_id)
        if found is None:
            raise self._missing(response_id, param)
        if (kept := self._of.get(tenant)) is not None and response_id in kept.messages:
            kept.messages.move_to_end(response_id)
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget an answer.

        Raises:
            RequestError: it is not kept, or is another tenant's (404).
        """
        kept = self._of.get(tenant)
        is_own = kept is not None and response_id in kept.messages
        if not (is_own if self._shared is None else self._shared.remove(tenant, response_id)):
            raise self._missing(response_id, "id")
        if kept is not None and is_own:
            self._bytes -= kept.drop(response_id)
            if kept.messages:
                heapq.heappush(self._largest, (-kept.size_bytes, tenant))
            else:
                del self._of[tenant]

    def _missing(self, response_id: str, param: str) -> RequestError:
        return RequestError(
            f"{response_id[:80]!r} is not kept here: it was sent with store: false, was deleted, is too old"
            f" (frontend.responses_bytes_max is {self._bytes_max}), or was answered on another host; send the whole"
            " conversation as input",
            field=param,
            http_status=404,
        )

    def check(self) -> None:
        """Raise AssertionError where the parts disagree, or it is past its bound."""
        assert self._bytes <= self._bytes_max, f"{self._bytes} of {self._bytes_max}"
        assert self._bytes == sum(kept.size_bytes for kept in self._of.values())
        found = {(-kept.size_bytes, tenant) for tenant, kept in self._of.items()}
        assert found <= set(self._largest), "each tenant stands in the heap with its size"
        for kept in self._of.values():
            assert kept.messages
            assert kept.size_bytes == sum(len(each) + ENTRY_BYTES for each in kept.messages.values())


def with_items(body: bytes, response: Callable[[str], bytes]) -> bytes:
    """Put items of kept answers in the place of references to them.

    Args:
        body: of `/v1/responses`.
        response: gives what is kept of an answer by its id; raises RequestError.

    Raises:
        RequestError: no kept answer has an item that is referred to (404), or a reference has no id (400).
    """
    if _REFERENCE not in body:
        return body
    whole = without_half_pairs(body)
    try:
        fields = msgspec.json.decode(whole)
    except (ValueError, RecursionError):  # told by whoever decodes it
        return body
    if whole != body and isinstance(fields, dict) and fields.get("strict") is True:
        return body
    given = fields.get("input") if isinstance(fields, dict) else None
    if not isinstance(given, list):
        return body
    for index, item in enumerate(given):
        if isinstance(item, dict) and item.get("type") == _REFERENCE.decode():
            param = f"input[{index}].id"
            if not isinstance(item_id := item.get("id"), str):
                raise wrong(param, item_id, "an item's id")
            given[index] = _item(item_id, param, response)
    return msgspec.json.encode(fields)


def _item(item_id: str, param: str, response: Callable[[str], bytes]) -> dict[str, Any]:
    """Give an item of a kept answer, whose id begins with the answer's."""
    found = _ITEM_ID.fullmatch(item_id)
    try:
        kept = kept_response(response(f"resp_{found[1]}")) if found is not None else None
    except RequestError:
        kept = None
    items = [] if kept is None else msgspec.json.decode(kept.response)["output"]
    for item in items:
        if item["id"] == item_id:
            return dict(item)
    raise RequestError(
        f"no kept answer has an item {item_id[:80]!r}; send the item itself",
        field=param,
        http_status=404,
    )


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


ANSWER_TOKENS_MAX = 1024
"""Room for an answer without a limit of its own: so many tokens, at most a quarter of the context."""
RENDERS_MAX = 10
"""Prompts that are made to find how many messages fit, beside two short ones at most; by estimates it takes about four."""
_SAMPLE = 8
"""What may be left out, the newest so many: they tell the template's overhead."""
_INSTRUCTIONS = ("system", "developer")


def answer_room(max_output_tokens: int | None, context_length: int) -> int:
    """Give the tokens to be left for the answer."""
    return max_output_tokens or max(1, min(ANSWER_TOKENS_MAX, context_length // 4))


def fitting_messages(
    messages: Sequence[Message],
    most: int,
    size_of: Callable[[Sequence[Message]], int | None],
    count_of: Callable[[Message], int],
) -> list[Message]:
    """Leave out as few of the oldest messages as make the others fit.

    Instructions, the last message of the user and the last item stay; a call and its outputs go together.

    Args:
        messages: of the conversation.
        most: tokens that a prompt may have.
        size_of: gives the tokens of these messages' prompt; None: it is too long, or the template refuses them.
        count_of: gives the tokens of one message's text; called once for each.

    Returns:
        Messages whose prompt fits, or all that have to stay.
    """
    units = _units(messages)
    size = size_of(messages) if units else 0
    if size is not None and size <= most:
        return list(messages)
    counts = [count_of(message) for message in messages]
    tokens = [sum(counts[index] for index in unit) for unit in units]
    overhead = 0.0  # of the template, a message
    if size is None:
        size, overhead = _estimate(messages, units, tokens, size_of)
    excess: float = (sum(counts) if size is None else size) - most
    low, high, fits = (
        0,
        len(units),
        False,
    )  # leaving out `low` units is not enough, `high` is or is all there are
    for _ in range(RENDERS_MAX):
        guess, freed = low, 0.0
        while guess < high and (guess == low or freed < excess):
            freed += tokens[guess] + overhead * len(units[guess])
            guess += 1
        if guess == high and (fits or high - low <= 1):
            break
        guess = min(guess, high - 1)
        dropped = set(chain.from_iterable(units[:guess]))
        now = size_of(_without(messages, dropped))
        if now is not None and size is not None:
            overhead = max(0.0, (size - now - sum(tokens[:guess])) / len(dropped))
        if now is not None and now <= most:
            high, fits = guess, True
        else:
            excess = max(1.0, excess - freed) if now is None else now - most
            low = guess
    return _without(messages, set(chain.from_iterable(units[:high])))


def _estimate(
    messages: Sequence[Message],
    units: Sequence[Sequence[int]],
    tokens: Sequence[int],
    size_of: Callable[[Sequence[Message]], int | None],
) -> tuple[int | None, float]:
    """Estimate the size of messages that are too long to be counted, and the template's overhead a message, by two short prompts."""
    first = max(0, len(units) - _SAMPLE)
    shortest = size_of(_without(messages, set(chain.from_iterable(units))))
    longer = size_of(_without(messages, set(chain.from_iterable(units[:first]))))
    if shortest is None or longer is None:
        return None, 0.0
    overhead = max(0.0, (longer - shortest - sum(tokens[first:])) / sum(map(len, units[first:])))
    return round(shortest + sum(tokens) + overhead * sum(map(len, units))), overhead


def _without(messages: Sequence[Message], dropped: set[int]) -> list[Message]:
    return [message for index, message in enumerate(messages) if index not in dropped]


def _units(messages: Sequence[Message]) -> list[list[int]]:
    """Give what may be left out, the oldest first: indexes of messages that go together."""
    asked = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
    units: list[list[int]] = []
    of_call: dict[str, list[int]] = {}
    for index, message in enumerate(messages):
        if message.role in _INSTRUCTIONS or index == asked:
            continue
        unit = of_call.get(message.tool_call_id or "") if message.role == "tool" else None
        if unit is None:
            unit = []
            units.append(unit)
        unit.append(index)
        for call in message.tool_calls or ():
            of_call[call["id"]] = unit
    return [unit for unit in units if len(messages) - 1 not in unit]
