"""Kept conversations: bounded by bytes, each tenant's own."""

import random
import tracemalloc

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest, Message
from penstock.frontend.openai.dialect import ParsedBody
from penstock.frontend.responses.store import ENTRY_BYTES, ResponseStore, stored_messages, with_answer


def body(*texts: str, instructions: int = 0, stores: bool = True) -> ParsedBody:
    messages = [
        Message(role="system" if index < instructions else "user", content=text)
        for index, text in enumerate(texts)
    ]
    return ParsedBody(ChatRequest(model="m", messages=messages), instructions=instructions, stores=stores)


def contents(parsed: ParsedBody) -> list[object]:
    assert isinstance(parsed.request, ChatRequest)
    return [message.content for message in parsed.request.messages]


def test_a_conversation_goes_between_instructions_and_input() -> None:
    kept = stored_messages(body("rule", "one", instructions=1), b"")
    assert kept is not None
    kept = with_answer(kept, Message(role="assistant", content="two"))
    later = body("other rule", "three", instructions=1)
    again = stored_messages(later, kept)
    assert contents(later) == ["other rule", "one", "two", "three"]
    unkept = body("three", stores=False)
    assert stored_messages(unkept, kept) is None
    assert contents(unkept) == ["one", "two", "three"]
    assert again is not None
    next_turn = body("four")
    stored_messages(next_turn, again)
    assert contents(next_turn) == ["one", "two", "three", "four"]


def test_the_oldest_unused_go_first_and_tenants_have_their_own() -> None:
    store = ResponseStore(bytes_max=25 + 2 * ENTRY_BYTES)
    store.put("a", "r1", bytes(10))
    store.put("a", "r2", bytes(10))
    assert store.get("a", "r1") == bytes(10)
    store.put("a", "r3", bytes(10))  # r2 was used least recently
    store.put("a", "huge", bytes(26 + 2 * ENTRY_BYTES))
    assert store.get("a", "r1") == store.get("a", "r3") == bytes(10)
    for tenant, response_id in (("a", "r2"), ("a", "huge"), ("b", "r1")):
        with pytest.raises(RequestError) as caught:
            store.get(tenant, response_id)
        assert (caught.value.http_status, caught.value.param) == (404, "previous_response_id")


def test_a_tenant_pushes_out_its_own_conversations_and_no_smaller_tenants() -> None:
    store = ResponseStore(bytes_max=20 * (100 + ENTRY_BYTES))
    for number in range(4):
        store.put("quiet", f"q{number}", bytes(100))
        store.put("small", f"s{number}", bytes(10))
    for number in range(1000):
        store.put("flood", f"f{number}", bytes(100))
    for number in range(4):
        assert store.get("quiet", f"q{number}") == bytes(100)
        assert store.get("small", f"s{number}") == bytes(10)
    assert store.get("flood", "f999") == bytes(100)
    with pytest.raises(RequestError):
        store.get("flood", "f0")
    for number in range(20):  # another one that comes later gets as much as the largest
        store.put("late", f"l{number}", bytes(100))
    assert store.get("late", "l19") == bytes(100)
    assert store.get("late", "l15") == bytes(100)
    assert store.get("quiet", "q0") == bytes(100)


def test_a_store_of_many_tenants_stays_within_its_bound() -> None:
    rng = random.Random(3)
    bytes_max = 50 * ENTRY_BYTES
    store = ResponseStore(bytes_max)
    for number in range(20_000):
        tenant = f"t{min(rng.randrange(200), rng.randrange(200))}"
        store.put(tenant, f"r{rng.randrange(30)}", bytes(rng.randrange(300)))
        if number % 100 == 0:
            store.check()


def test_the_same_id_is_counted_once() -> None:
    store = ResponseStore(bytes_max=25 + 2 * ENTRY_BYTES)
    for _ in range(5):
        store.put("a", "r1", bytes(10))
    store.put("a", "r2", bytes(10))
    assert store.get("a", "r1") == store.get("a", "r2") == bytes(10)


def test_many_tiny_conversations_take_no_more_memory_than_the_bound() -> None:
    bytes_max = 1 << 20
    store = ResponseStore(bytes_max)
    tracemalloc.start()
    for number in range(10_000):
        store.put(f"tenant-{number % 3}", f"resp_{number:024x}", number.to_bytes(40))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert bytes_max / 2 < taken < bytes_max * 1.5
