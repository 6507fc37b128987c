"""Which of a conversation's oldest messages are left out where all of them are too long for the model (`truncation: "auto"`)."""

from collections.abc import Callable, Sequence
from itertools import chain

from penstock.frontend.openai.bodies import Message

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
