"""Pieces of an answer become deltas: stop tokens last, no more than was asked for."""

import pytest

from penstock.core.errors import StepFailed
from penstock.core.ids import RequestId
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens, token_list
from penstock.engine.openai.apis.api import AnswerPiece
from penstock.engine.openai.engine import ServerStream

EOS = 7


def stream_of(
    *, max_tokens: int = 10, num_emitted: int = 0, stops: tuple[int, ...] = (), **fields
) -> ServerStream:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stops, **fields)
    request = Request(
        request_id=RequestId("r"),
        model="m",
        token_ids=pack_tokens([1, 2, 3]),
        sampling=sampling,
        num_emitted=num_emitted,
    )
    return ServerStream(request, (EOS,), {})


def fed(stream: ServerStream, *pieces: AnswerPiece) -> list[int]:
    return [
        token for piece in pieces if (delta := stream.feed(piece)) for token in token_list(delta.token_ids)
    ]


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_a_stop_token_before_the_end_is_a_token(fields):
    stream = stream_of(**fields)
    assert fed(stream, AnswerPiece((4, EOS)), AnswerPiece((5,), finish_reason=FinishReason.LENGTH)) == [
        4,
        EOS,
        5,
    ]
    assert not stream.end().token_ids


@pytest.mark.parametrize("pieces", [[(4, EOS, 5)], [(4, EOS), (5,)], [(4,), (EOS,), (5,)]])
def test_an_answer_ends_at_an_end_that_its_server_does_not_know(pieces):
    stream = stream_of(num_emitted=1, min_tokens=2)
    assert fed(stream, *map(AnswerPiece, pieces)) == [4]
    assert stream.is_over
    last = stream.end()
    assert (token_list(last.token_ids), last.finish_reason) == ([EOS], FinishReason.STOP)


def test_an_end_without_its_token_gets_one():
    stream = stream_of()
    assert fed(stream, AnswerPiece((4,)), AnswerPiece(finish_reason=FinishReason.STOP)) == [4]
    assert token_list(stream.end().token_ids) == [EOS]


def test_a_stop_token_that_came_before_the_end_is_not_added_again():
    stream = stream_of(stops=(9,))
    assert fed(stream, AnswerPiece((4, 9)), AnswerPiece(finish_reason=FinishReason.STOP)) == [4]
    assert token_list(stream.end().token_ids) == [9]


def test_cached_tokens_come_with_the_end():
    stream = stream_of()
    fed(stream, AnswerPiece((4,), finish_reason=FinishReason.LENGTH))
    assert not stream.is_over, "the count of cached tokens may follow"
    stream.feed(AnswerPiece(cached_tokens=3))
    assert stream.is_over
    assert stream.end().cached_tokens == 3


def test_an_answer_that_breaks_off_is_no_end():
    stream = stream_of()
    fed(stream, AnswerPiece((4,)))
    with pytest.raises(StepFailed, match="closed the connection within an answer"):
        stream.end()


def test_no_stop_token_is_added_beyond_max_tokens():
    stream = stream_of(max_tokens=2)
    assert fed(stream, AnswerPiece((4, 5)), AnswerPiece(finish_reason=FinishReason.STOP)) == [4, 5]
    end = stream.end()
    assert (token_list(end.token_ids), end.finish_reason) == ([], FinishReason.STOP)


@pytest.mark.parametrize(("said", "told"), [(-5, 0), (2, 2), (4, 3), (10**30, 3)])
def test_cached_tokens_are_at_most_those_of_the_prompt(said, told):
    stream = stream_of()
    delta = stream.feed(AnswerPiece((4,), cached_tokens=said))
    assert delta is not None
    assert delta.cached_tokens == told
