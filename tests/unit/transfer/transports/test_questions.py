"""Questions to a peer's transport, and what becomes of them."""

import asyncio

import pytest

from penstock.core.errors import PeerLost, ProtocolError
from penstock.sim.loop.loop import run_virtual
from penstock.transfer.transports.questions import Questions


def test_answers_go_to_who_asked_in_whatever_order():
    async def scenario():
        questions = Questions("b")
        numbers = [questions.number() for _ in range(2)]
        waiting = [questions.ask(number) for number in numbers]
        questions.answered(numbers[1], "second")
        questions.answered(numbers[0], "first")
        assert [await one for one in waiting] == ["first", "second"]
        assert len(questions) == 0
        with pytest.raises(ProtocolError, match=r"agent b: an answer to question 1, which nobody asked"):
            questions.answered(numbers[0], "again")

    run_virtual(scenario())


def test_an_answer_to_who_has_given_up_is_dropped():
    async def scenario():
        questions = Questions("b")
        number = questions.number()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await questions.ask(number)
        questions.answered(number, "late")
        assert len(questions) == 0

    run_virtual(scenario())


def test_who_is_gone_answers_nothing_and_is_not_asked():
    async def scenario():
        questions = Questions("b")
        waiting = questions.ask(questions.number())
        questions.end(PeerLost("agent b is gone"))
        questions.end(PeerLost("said again"))
        for ask in (lambda: waiting, lambda: questions.ask(questions.number())):
            with pytest.raises(PeerLost, match="is gone"):
                await ask()

    run_virtual(scenario())
