"""A request's choices run side by side over a dispatcher."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from penstock.core.errors import EngineError, Unavailable
from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.metrics import FrontendMetrics
from penstock.frontend.openai.bodies import CompletionRequest
from penstock.frontend.requests.completion import Completion
from penstock.frontend.requests.preprocess import Preprocessor, RequestMetadata
from penstock.frontend.text.events import TextEvent
from penstock.frontend.text.models import ServedModel
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card, tiny_model_files, tiny_tokenizer_json

TEXT = "the quick brown fox"
IDS = Tokenizer.from_buffer(tiny_tokenizer_json()).encode(TEXT).ids


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
