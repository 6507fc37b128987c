"""The fewest of the oldest messages are left out, in few renders; instructions, the question and calls with their outputs stay whole."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.openai.bodies import Message
from penstock.frontend.responses.truncation import RENDERS_MAX, answer_room, fitting_messages

FIXED, OVERHEAD = 7, 4
"""Tokens that a template writes at all, and for each message."""


def said(role: str, tokens: int = 1, **fields: Any) -> Message:
    return Message(role=role, content="x" * tokens, **fields)


def call(*names: str) -> Message:
    return said("assistant", tool_calls=[{"id": name, "type": "function"} for name in names])


def output(name: str, tokens: int = 1) -> Message:
    return said("tool", tokens, tool_call_id=name)


def count_of(message: Message) -> int:
    return len(message.content or "")


def size_of(messages: Sequence[Message]) -> int:
    return FIXED + sum(OVERHEAD + count_of(message) for message in messages)


def fit(messages: Sequence[Message], most: int) -> list[Message]:
    renders = 0

    def counted(some: Sequence[Message]) -> int:
        nonlocal renders
        renders += 1
        return size_of(some)

    kept = fitting_messages(messages, most, counted, count_of)
    assert renders <= RENDERS_MAX + 1
    return kept


def roles(messages: Sequence[Message]) -> list[str]:
    return [f"{message.role[0]}{count_of(message)}" for message in messages]


TALK = [
    said("system", 9),
    said("user", 1),
    said("assistant", 2),
    said("developer", 8),
    said("user", 3),
    said("assistant", 4),
    said("user", 5),
]


def test_the_oldest_are_left_out_until_the_others_fit() -> None:
    whole = size_of(TALK)
    assert fit(TALK, whole) == TALK
    assert roles(fit(TALK, whole - 1)) == ["s9", "a2", "d8", "u3", "a4", "u5"]
    assert roles(fit(TALK, whole - 6)) == ["s9", "d8", "u3", "a4", "u5"]
    assert roles(fit(TALK, 1)) == ["s9", "d8", "u5"]  # they stay, and are refused later


def test_a_call_and_its_outputs_go_together() -> None:
    talk = [said("user"), call("a", "b"), output("b"), said("user", 2), output("a"), said("user", 3)]
    whole = size_of(talk)
    assert roles(fit(talk, whole - 6)) == ["u2", "u3"]
    rounds = [said("user", 9), call("a"), output("a"), call("b"), output("b"), call("c"), output("c")]
    assert fit(rounds, size_of(rounds) - 1) == [rounds[0], *rounds[3:]]
    assert fit(rounds, 1) == [rounds[0], *rounds[5:]]  # what is to be answered stays


def test_what_a_template_refuses_is_made_shorter() -> None:
    def picky(messages: Sequence[Message]) -> int | None:
        return None if messages[0].role != "user" else size_of(messages)

    talk = [said(role) for role in ("user", "assistant", "user", "assistant", "user")]
    assert fitting_messages(talk, size_of(talk) - 1, picky, count_of) == talk[2:]


def test_many_short_messages_that_nobody_counts_are_left_out_no_further_than_needed() -> None:
    """Most of their tokens are the template's, and the size of all of them is not known."""
    talk = [said(role) for role in ("user", "assistant") * 5_000] + [said("user")]

    def short_ones(messages: Sequence[Message]) -> int | None:
        return None if len(messages) > 200 else size_of(messages)

    kept = fitting_messages(talk, size_of(talk[-100:]), short_ones, count_of)
    assert len(kept) == 100


def test_room_is_left_for_the_answer() -> None:
    assert answer_room(50, 512) == 50
    assert answer_room(None, 512) == 128
    assert answer_room(None, 1 << 17) == 1024
    assert answer_room(None, 2) == 1


@given(
    sizes=st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.integers(0, 300)), max_size=60),
    most=st.integers(1, 5000),
)  # fmt: skip
def test_no_more_is_left_out_than_has_to_be(sizes: list[tuple[str, int]], most: int) -> None:
    talk = [said(role, tokens) for role, tokens in [*sizes, ("user", 3)]]
    kept = fit(talk, most)
    droppable = [message for message in talk[:-1] if message.role != "system"]
    gone = len(talk) - len(kept)
    assert [message for message in kept if message.role != "system"] == [*droppable[gone:], talk[-1]]
    if gone < len(droppable):
        assert size_of(kept) <= most
    if gone:
        assert size_of([*kept, droppable[gone - 1]]) > most
