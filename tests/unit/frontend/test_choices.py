"""Choices run side by side over a dispatcher, and their deltas become text, the same however they are merged."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from penstock.core.errors import EngineError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.apis.bodies import CompletionRequest
from penstock.frontend.completion import ChoiceText, Completion
from penstock.frontend.metrics import FrontendMetrics
from penstock.frontend.prepare import Preprocessor, RequestMetadata
from penstock.frontend.text.answer import BlockKind, Blocks, BlockStep, TextEvent
from penstock.frontend.text.models import ServedModel
from penstock.frontend.text.parser import OutputParser, ParserPlan, format_of
from penstock.frontend.text.tokens import Detokenizer
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card, tiny_model_files, tiny_tokenizer_json

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


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.PREFILLED])
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


FORMAT = format_of("{% if x %}<think>{{ y }}</think><tool_call>{% endif %}")
THOUGHT, ANSWER = "<think>the quick brown 你好</think>", " fox jumps 🎉 over the dog"
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def told(deltas: list[Delta], stops: tuple[str, ...] = ()) -> tuple[object, ...]:
    """Give everything that one choice says, with its counts."""
    plan = ParserPlan(format=FORMAT, tools={"f": {}})
    choice = ChoiceText(0, DETOKENIZER, stops, begins_text=True, parser=OutputParser(plan))
    text, reasoning, calls, places, reason = "", "", "", [], None
    for delta in deltas:
        event = choice.feed(delta)
        if event is not None:
            text, reasoning = text + event.text, reasoning + event.reasoning
            calls += "".join((call.name or "") + call.arguments for call in event.calls)
            places += [token.start for token in event.logprobs]
            reason = event.finish_reason
        if choice.finished:
            break
    return text, reasoning, calls, places, reason, choice.output_tokens, choice.reasoning_tokens


def merged(ids: list[int], sizes: list[int]) -> list[Delta]:
    deltas, start = [], 0
    for size in sizes:
        part = ids[start : start + size]
        start += size
        deltas.append(
            Delta(
                request_id="r",
                token_ids=pack_tokens(part),
                logprobs=tuple(TokenLogprob(token, -1.0) for token in part),
                finish_reason=FinishReason.LENGTH if start >= len(ids) else None,
            )
        )
    return deltas


@pytest.mark.parametrize("stops", [(), ("jumps",)])
@pytest.mark.parametrize("rest", [ANSWER, ANSWER + CALL, ""])
def test_they_do_not_depend_on_how_deltas_are_merged(rest: str, stops: tuple[str, ...]) -> None:
    assert FORMAT.reasoning is not None
    ids = TOKENIZER.encode(THOUGHT + rest, add_special_tokens=False).ids
    one_by_one = told(merged(ids, [1] * len(ids)), stops)
    thought = len(TOKENIZER.encode(THOUGHT, add_special_tokens=False).ids)
    assert thought - 1 <= one_by_one[-1] <= thought + 1
    assert one_by_one[1] == "the quick brown 你好"
    draws = random.Random(7)
    for _ in range(30):
        sizes: list[int] = []
        while sum(sizes) < len(ids):
            sizes.append(min(draws.randint(1, 12), len(ids) - sum(sizes)))
        assert told(merged(ids, sizes), stops) == one_by_one
    assert told(merged(ids, [len(ids)]), stops) == one_by_one


async def completion(
    dispatcher: ScriptedDispatcher, metrics: FrontendMetrics | None = None, **fields
) -> Completion:
    preprocessor = Preprocessor(hash_key=bytes(16), rng=random.Random(0))
    request = CompletionRequest(model="tiny", **{"prompt": "dog", **fields})
    model = ServedModel(tiny_card(), tiny_model_files())
    prompts = await preprocessor.encode(request, model, 1)
    work = preprocessor.prepared(request, model, RequestMetadata("cmpl-1", 1, 1e9), prompts)
    metrics = metrics or FrontendMetrics(CollectorRegistry())
    timer = metrics.timer("tiny", asyncio.get_running_loop().time(), 1)
    return Completion(work, dispatcher, timer)


async def test_choices_are_interleaved_and_counted_once_each() -> None:
    dispatcher = ScriptedDispatcher(speak(IDS))
    run = await completion(dispatcher, prompt=["dog", "fox"], n=2)
    events: list[TextEvent] = []
    await run.run(events.append)
    for index in range(4):
        assert "".join(event.text for event in events if event.index == index) == TEXT
    assert [event.index for event in events[:4]] == [0, 1, 2, 3]
    assert run.usage().completion_tokens == 4 * len(IDS)
    first, _, third, _ = (request.request_id for request in dispatcher.opened)
    assert dispatcher.beside == [None, first, None, third], "each prompt is computed once"


@pytest.mark.parametrize("at_once", [1, 40])
@pytest.mark.parametrize(
    ("stop", "finish"), [(None, FinishReason.LENGTH), (None, FinishReason.STOP), ("brown", FinishReason.STOP)]
)
async def test_token_ids_are_those_that_count_as_output(at_once, stop, finish) -> None:
    dispatcher = ScriptedDispatcher(speak(IDS * 3, at_once=at_once, finish=finish))
    run = await completion(dispatcher, stop=stop, return_token_ids=True)
    events: list[TextEvent] = []
    await run.run(events.append)
    given = [token_id for event in events for token_id in event.token_ids or ()]
    assert given == (IDS * 3)[: run.usage().completion_tokens]
    assert (stop is None) == (given == IDS * 3)
    assert [event.prompt is not None for event in events] == [True] + [False] * (len(events) - 1)


@pytest.mark.parametrize("at_once", [1, 3, 50])
async def test_token_ids_and_log_probabilities_come_together(at_once) -> None:
    ids = Tokenizer.from_buffer(tiny_tokenizer_json()).encode("ab \N{GRINNING FACE} fox").ids

    async def script(request: Request) -> AsyncIterator[Delta]:
        for start in range(0, len(ids), at_once):
            some = ids[start : start + at_once]
            yield Delta(
                request_id=request.request_id,
                token_ids=pack_tokens(some),
                logprobs=tuple(TokenLogprob(token_id, -1.0, ()) for token_id in some),
                finish_reason=FinishReason.LENGTH if start + at_once >= len(ids) else None,
            )

    run = await completion(ScriptedDispatcher(script), return_token_ids=True, logprobs=0)
    events: list[TextEvent] = []
    await run.run(events.append)
    for event in events:
        assert list(event.token_ids) == [token.logprob.token_id for token in event.logprobs]
    assert [token_id for event in events for token_id in event.token_ids] == ids


async def _failing(request: Request) -> AsyncIterator[Delta]:
    yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS[:1]))
    await asyncio.sleep(0)
    if request.choice == 1:
        raise Unavailable("no worker is left")
    await asyncio.sleep(3600)


async def test_one_choice_that_fails_ends_them_all() -> None:
    dispatcher = ScriptedDispatcher(_failing)
    run = await completion(dispatcher, n=3)
    with pytest.raises(Unavailable, match="no worker is left"):
        await run.run([].append)
    assert dispatcher.open_streams == 0
    assert dispatcher.cancelled == 3


async def test_a_stream_without_an_end_is_an_error() -> None:
    async def endless(request: Request) -> AsyncIterator[Delta]:
        yield Delta(request_id=request.request_id, token_ids=pack_tokens(IDS))

    run = await completion(ScriptedDispatcher(endless))
    with pytest.raises(EngineError, match="ended without"):
        await run.run([].append)


async def test_cached_tokens_are_those_of_each_prompts_first_choice() -> None:
    async def cached(request: Request) -> AsyncIterator[Delta]:
        yield Delta(
            request_id=request.request_id, finish_reason=FinishReason.STOP, cached_tokens=16 + request.choice
        )

    run = await completion(ScriptedDispatcher(cached), prompt=["dog", "fox"], n=2)
    await run.run([].append)
    assert run.usage().prompt_tokens_details.cached_tokens == 16 + 18


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": ["brown"]}, {"n": 2}])
async def test_a_gathered_answer_is_the_same_in_fewer_events(fields: dict[str, object]) -> None:
    texts, counts, usages = [], [], []
    for gathers in (False, True):
        run = await completion(ScriptedDispatcher(speak(IDS * 300)), **fields)
        events: list[TextEvent] = []
        await run.run(events.append, gathers=gathers)
        texts.append(["".join(e.text for e in events if e.index == index) for index in range(2)])
        counts.append(len(events))
        usages.append(run.usage())
    assert texts[0] == texts[1]
    assert usages[0] == usages[1]
    if fields.keys() & {"logprobs", "stop"}:
        assert counts[0] == counts[1], "a stop string is found at its token"
    else:
        assert 1 < counts[1] < counts[0] / 100


async def test_tokens_that_wait_for_others_count_when_a_gathered_answer_is_cut() -> None:
    run = await completion(ScriptedDispatcher(_failing), n=1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run.run([].append, gathers=True), 0.2)
    assert run.usage().completion_tokens == 1


async def test_tokens_and_times_are_counted() -> None:
    registry = CollectorRegistry()
    run = await completion(ScriptedDispatcher(speak(IDS)), FrontendMetrics(registry))
    await run.run([].append)
    label = {"model": "tiny"}
    assert registry.get_sample_value("penstock_frontend_output_tokens_total", label) == len(IDS)
    assert registry.get_sample_value("penstock_frontend_ttft_seconds_count", label) == 1
    assert registry.get_sample_value("penstock_frontend_itl_seconds_count", label) == len(IDS) - 1
    assert registry.get_sample_value("penstock_frontend_e2e_seconds_count", label) == 1


TALES = {
    "hermes": (
        "<tool_call> <think>",
        (
            '<think>hm</think>I look.<tool_call>{"name": "now", "arguments": {"a": "x"}}</tool_call>So it is.<think>and</think>'
            '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>Done.'
        ),
    ),
    "qwen3-coder": (
        "<tool_call> <function= <think>",
        (
            "I look.<tool_call><function=now><parameter=a>x</parameter></function></tool_call>So it is.<tool_call><function=now>"
            "</function></tool_call>Done."
        ),
    ),
    "mistral": (
        "[TOOL_CALLS] [THINK]",
        '[THINK]hm[/THINK]I look.[TOOL_CALLS]now[ARGS]{"a": "x"} So it is.[TOOL_CALLS]now[ARGS]{} Done.',
    ),
    "json": ("", '{"name": "now", "parameters": {"a": "x"}}; {"name": "now", "parameters": {}} So it is.'),
    "harmony": (
        "<|start|>assistant<|channel|>",
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>I look.<|end|><|start|>"
            'assistant<|channel|>commentary to=functions.now<|message|>{"a": "x"}<|call|><|start|>assistant<|channel|>final'
            "<|message|>Done.<|end|>"
        ),
    ),
}


@pytest.mark.parametrize("family", TALES)
def test_the_order_of_text_and_calls_does_not_depend_on_how_tokens_arrive(family: str) -> None:
    template, tale = TALES[family]
    ids = TOKENIZER.encode(tale).ids
    found = []
    for size in (1, 2, 3, 7, 20, 31, 40, len(ids)):
        blocks = Blocks()
        one = ChoiceText(
            0,
            DETOKENIZER,
            (),
            begins_text=True,
            parser=OutputParser(ParserPlan(format=format_of(template), tools={"now": {}})),
        )
        for start in range(0, len(ids), size):
            event = one.feed(delta(ids[start : start + size]))
            steps = [] if event is None else list(blocks.feed(event))
            assert all(
                step is not BlockStep.OPENED or block.kind is not BlockKind.CALL or block.name
                for step, block, _ in steps
            )
        event = one.feed(delta([END], FinishReason.STOP))
        assert event is not None
        list(blocks.feed(event))
        found.append([(block.kind, block.name, block.text) for block in blocks.all])
    assert len(found[0]) > 2
    assert all(blocks == found[0] for blocks in found)
