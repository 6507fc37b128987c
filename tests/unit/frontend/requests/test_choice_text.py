"""One choice's deltas become text events."""

import pytest
from tokenizers import Tokenizer

from penstock.core.errors import EngineError
from penstock.core.ids import RequestId
from penstock.core.types.requests import Delta, FinishReason, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.requests.choice_text import ChoiceText
from penstock.frontend.text.detokenize import Detokenizer
from penstock.frontend.text.events import TextEvent
from tests.support.tokenizer import tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
DETOKENIZER = Detokenizer(TOKENIZER, tiny_tokenizer_json())
TEXT = "the quick brown fox"
IDS = TOKENIZER.encode(TEXT).ids
END = 0


def delta(token_ids: list[int], reason: FinishReason | None = None, *, logprobs: bool = False) -> Delta:
    return Delta(
        request_id=RequestId("r"),
        token_ids=pack_tokens(token_ids),
        finish_reason=reason,
        logprobs=tuple(TokenLogprob(token_id=i, logprob=-0.5) for i in token_ids) if logprobs else (),
    )


def choice(*stops: str) -> ChoiceText:
    return ChoiceText(0, DETOKENIZER, stops, begins_text=True)


def test_a_stop_token_counts_but_is_no_text() -> None:
    one = choice()
    fox = TOKENIZER.token_to_id("f")
    assert one.feed(delta([*IDS, fox], FinishReason.STOP)) == TextEvent(0, TEXT, "stop")
    assert one.output_tokens == len(IDS) + 1


def test_a_stop_string_ends_the_choice_and_the_count() -> None:
    one = choice("brown")
    event = one.feed(delta([*IDS, END], FinishReason.STOP))
    assert event == TextEvent(0, "the quick ", "stop", stopped_by="brown")
    used = TOKENIZER.decode(IDS[: one.output_tokens])
    assert "brown" in used
    assert "brown" not in TOKENIZER.decode(IDS[: one.output_tokens - 1])


def test_a_stop_string_completed_by_the_last_token_beats_the_length() -> None:
    one = choice("fox")
    event = one.feed(delta(IDS, FinishReason.LENGTH))
    assert event == TextEvent(0, "the quick brown ", "stop", stopped_by="fox")


def test_logprobs_come_with_their_text_and_not_with_a_stop_string() -> None:
    one = choice("fox")
    events = [one.feed(delta([token_id], logprobs=True)) for token_id in IDS]
    given = [event for event in events if event is not None]
    tokens = [token for event in given for token in event.logprobs]
    text = "".join(event.text for event in given)
    assert text == "the quick brown "
    assert [token.logprob.token_id for token in tokens] == IDS[: len(tokens)]
    assert all(token.start < len(text) for token in tokens)
    starts = [token.start for token in tokens]
    assert starts == sorted(starts)
    assert starts[0] == 0


def test_all_logprobs_are_out_at_the_end() -> None:
    one = choice()
    event = one.feed(delta([*IDS, TOKENIZER.token_to_id("ð"), END], FinishReason.STOP, logprobs=True))
    assert event is not None
    assert len(event.logprobs) == len(IDS) + 1  # the stop token's is left out, as its text is


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.PREFILLED])
def test_a_worker_that_gives_up_is_an_error(reason: FinishReason) -> None:
    with pytest.raises(EngineError, match=str(reason)):
        choice().feed(delta([], reason))


def test_stop_strings_wait_for_the_least_number_of_tokens() -> None:
    count = len(IDS)
    one = ChoiceText(0, DETOKENIZER, ("the",), begins_text=True, min_tokens=count)
    assert one.feed(delta(IDS)) == TextEvent(0, TEXT)
    assert one.feed(delta(IDS)) == TextEvent(0, "", "stop", stopped_by="the")
    assert one.output_tokens == count + 1


def showing(*stops: str) -> ChoiceText:
    return ChoiceText(0, DETOKENIZER, stops, begins_text=True, shows_stop=True)


def test_what_ended_a_choice_stays_in_its_text_where_that_is_asked_for() -> None:
    fox = TOKENIZER.token_to_id("f")
    assert showing().feed(delta([*IDS, fox], FinishReason.STOP)) == TextEvent(0, f"{TEXT}f", "stop")
    assert showing().feed(delta([*IDS, END], FinishReason.STOP)) == TextEvent(0, TEXT, "stop")
    one = showing("brown")
    texts, reasons = [], []
    for token_id in IDS:  # the stop string is cut by chunks
        event = None if one.finished else one.feed(delta([token_id], logprobs=True))
        if event is not None:
            texts.append(event.text)
            reasons.append(event.finish_reason)
    assert "".join(texts) == "the quick brown"
    assert reasons[-1] == "stop"
    assert one.output_tokens == len(TOKENIZER.encode("the quick brown").ids)
