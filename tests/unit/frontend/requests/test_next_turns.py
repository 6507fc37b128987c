"""What is computed ahead for an agent's next turn, by a dispatcher that a test scripts."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.core.errors import Overloaded, Unavailable
from penstock.core.hashing import block_hashes
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens, unpack_hashes, unpack_tokens
from penstock.frontend.metrics import FrontendMetrics
from penstock.frontend.openai.bodies import ChatRequest, Message, parse_chat
from penstock.frontend.requests import next_turns as module
from penstock.frontend.requests.encoding import encode_chat
from penstock.frontend.requests.next_turns import Answer, NextTurns
from penstock.frontend.requests.preprocess import PreparedRequest, Preprocessor, RequestMetadata
from penstock.frontend.text.models import ServedModel
from tests.support.dispatcher import ScriptedDispatcher, ScriptedStream
from tests.support.tokenizer import tiny_card, tiny_model_files

pytestmark = pytest.mark.virtual

KEY = bytes(16)
LONG = "the quick brown fox jumps over the lazy dog " * 4
THINKING = (
    "{% set last = namespace(user=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' and loop.index0 < last.user %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def model(template: str | None = None) -> ServedModel:
    files = tiny_model_files()
    if template is not None:
        config = json.loads(files["tokenizer_config.json"]) | {"chat_template": template}
        files["tokenizer_config.json"] = json.dumps(config).encode()
    return ServedModel(tiny_card(files=files), files)


class Scene:
    """Next turns over a scripted dispatcher; each answer is that of `outcomes`, then a computed prompt."""

    def __init__(self, served: ServedModel | None = None, **bounds: Any) -> None:
        self.model = served or model()
        self.outcomes: list[Any] = []
        self.dispatcher = ScriptedDispatcher(self._script)
        self.registry = CollectorRegistry()
        self.hanging = asyncio.Event()
        fields: dict[str, Any] = {"turns_max": 4, "within_s": 5.0, **bounds}
        self.turns = NextTurns(
            self.dispatcher,
            FrontendMetrics(self.registry),
            hash_key=KEY,
            new_id=lambda: str(len(self.dispatcher.opened)),
            **fields,
        )

    async def _script(self, request: Request) -> AsyncIterator[Delta]:
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, Exception):
            raise outcome
        if outcome == "hang":
            self.hanging.set()
            await asyncio.sleep(3600)
        if outcome == "busy":
            yield Delta(request_id=request.request_id, finish_reason=FinishReason.CANCELLED)
            return
        yield Delta(
            request_id=request.request_id,
            token_ids=pack_tokens([7]),
            finish_reason=FinishReason.LENGTH,
            cached_tokens=16,
        )

    async def prepare(self, body: dict[str, Any]) -> tuple[ChatRequest, PreparedRequest]:
        fields = {"model": "tiny", "agent_hints": {"speculative_prefill": True}, **body}
        request = parse_chat(json.dumps(fields).encode())
        preprocessor = Preprocessor(hash_key=KEY, rng=random.Random(0))
        prompts = await preprocessor.encode(request, self.model, 1)
        metadata = RequestMetadata("chatcmpl-1", 1, 1e9)
        return request, preprocessor.prepared(request, self.model, metadata, prompts)

    async def answer(self, text: str = "so it is", content: str = LONG, **fields: Any) -> PreparedRequest:
        """Answer a chat; its tokens are not those that the text is encoded to."""
        request, prepared = await self.prepare({"messages": [{"role": "user", "content": content}], **fields})
        self.turns.arrived(prepared)
        on_answer = self.turns.follow(request, prepared, 1000)
        if on_answer is not None:
            stream = ScriptedStream(self.dispatcher, prepared.requests[0])
            on_answer(Answer(text, [300, 301, 302], stream))
        return prepared

    async def ended(self) -> None:
        """Wait until every turn has ended, or been given up."""
        await asyncio.sleep(60)

    def count(self, outcome: str) -> float:
        name = "penstock_frontend_next_turns_total"
        return self.registry.get_sample_value(name, {"outcome": outcome}) or 0.0


@asynccontextmanager
async def scene_of(served: ServedModel | None = None, **bounds: Any) -> AsyncIterator[Scene]:
    made = Scene(served, **bounds)
    yield made
    await made.turns.close()
    assert made.dispatcher.open_streams == 0


async def test_the_full_blocks_that_every_next_turn_begins_with_are_computed() -> None:
    async with scene_of() as scene:
        answered = await scene.answer("so it is", session={"id": "a", "action": "open"})
        await scene.ended()
        (sent,) = scene.dispatcher.opened
        messages = [Message(role="user", content=LONG), Message(role="assistant", content="so it is")]
        for content in ("and then?", "17 rivers"):
            turn = encode_chat(scene.model, [*messages, Message(role="user", content=content)])
            tokens = unpack_tokens(sent.token_ids)
            assert tokens.tolist() == turn[: len(tokens)].tolist()
            assert len(turn) - len(tokens) < 16 + 8, "no block less"
        hashes = block_hashes(tokens, 16, sent.salt, key=KEY)
        assert unpack_hashes(sent.block_hashes).reshape(-1, 2).tolist() == hashes.tolist()
        assert (sent.is_background, sent.session, sent.priority) == (True, "a", -1000)
        assert sent.sampling.max_tokens == 1
        assert scene.dispatcher.beside == [answered.requests[0].request_id], "at the same worker"
        assert scene.count("computed") == 1
        name = "penstock_frontend_next_turn_tokens_total"
        assert scene.registry.get_sample_value(name) == len(tokens) - 16


async def test_thoughts_that_the_template_leaves_out_are_left_out() -> None:
    async with scene_of(model(THINKING)) as scene:
        await scene.answer(LONG + "</think>so it is " + LONG)
        await scene.answer(LONG + "</think><tool_call>{}</tool_call>" + LONG, content="dog " + LONG)
        await scene.ended()
        final, tool = sorted(scene.dispatcher.opened, key=lambda request: len(request.token_ids))
        said = scene.model.tokenizer.decode(unpack_tokens(final.token_ids).tolist())
        assert "</think>" not in said
        said = scene.model.tokenizer.decode(unpack_tokens(tool.token_ids).tolist())
        assert "</think>" in said, "a tool's result continues the answer as it is"


async def test_what_the_worker_has_computed_anyway_is_not_computed_again() -> None:
    async with scene_of() as scene:
        request, prepared = await scene.prepare({"messages": [{"role": "user", "content": LONG}]})
        on_answer = scene.turns.follow(request, prepared, 1000)
        assert on_answer is not None
        text = "dog " * 20
        said = [Message(role="user", content=LONG), Message(role="assistant", content=text)]
        whole = encode_chat(scene.model, [*said, Message(role="user", content="x")])
        prompt = unpack_tokens(prepared.requests[0].token_ids)
        assert whole[: len(prompt)].tolist() == prompt.tolist()
        tokens = whole[len(prompt) :].tolist()
        on_answer(Answer(text, tokens, ScriptedStream(scene.dispatcher, prepared.requests[0])))
        await scene.ended()
        assert (scene.count("held"), scene.dispatcher.opened) == (1, [])


@pytest.mark.parametrize("within_s", [5.0, -1.0])
async def test_a_busy_worker_is_asked_again_for_a_while(within_s: float) -> None:
    async with scene_of(within_s=within_s) as scene:
        scene.outcomes = ["busy", Overloaded("full", retry_after_s=1.0), "busy"]
        await scene.answer()
        await scene.ended()
        asked = {request.request_id for request in scene.dispatcher.opened}
        outcome = (scene.count("computed"), scene.count("busy"), len(asked))
        assert outcome == ((1, 0, 4) if within_s > 0 else (0, 1, 1))


@pytest.mark.parametrize(
    "next_turn",
    [{"content": "unlike", "session": {"id": "a"}}, {"content": LONG + "dog"}],
    ids=["of the session", "beginning alike"],
)
async def test_the_next_turn_ends_what_is_computed_for_it(next_turn: dict[str, Any]) -> None:
    async with scene_of() as scene:
        session = {"session": {"id": "a", "action": "open"}} if "session" in next_turn else {}
        scene.outcomes = ["hang"]
        await scene.answer(**session)
        await scene.hanging.wait()
        _, other = await scene.prepare({"messages": [{"role": "user", "content": "another one " + LONG}]})
        scene.turns.arrived(other)
        await asyncio.sleep(0)
        assert scene.dispatcher.open_streams == 1
        await scene.answer(**next_turn)
        await scene.ended()
        assert (scene.count("arrived"), scene.dispatcher.cancelled) == (1, 1)
        assert scene.dispatcher.open_streams == 0


async def test_another_tenants_request_ends_nothing() -> None:
    async with scene_of() as scene:
        scene.outcomes = ["hang"]
        await scene.answer()
        await scene.hanging.wait()
        _, other = await scene.prepare({"messages": [{"role": "user", "content": LONG}]})
        theirs = [msgspec.structs.replace(request, tenant="other") for request in other.requests]
        scene.turns.arrived(msgspec.structs.replace(other, requests=tuple(theirs)))
        await asyncio.sleep(0)
        assert scene.dispatcher.open_streams == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"agent_hints": {}}, "no hint"),
        ({"n": 2}, "two answers"),
        ({"session": {"id": "a", "action": "close"}}, "the last one"),
    ],
)
async def test_requests_without_a_next_turn_are_not_followed(fields: dict[str, Any], why: str) -> None:
    async with scene_of() as scene:
        request, prepared = await scene.prepare({"messages": [{"role": "user", "content": LONG}], **fields})
        assert scene.turns.follow(request, prepared, 1000) is None, why


async def test_turns_and_bodies_kept_are_bounded() -> None:
    async with scene_of(turns_max=2) as scene:
        scene.outcomes = ["hang", "hang"]
        for number in range(3):
            await scene.answer(content=f"{number} {LONG}")
        assert scene.count("dropped") == 1
        request, prepared = await scene.prepare({"messages": [{"role": "user", "content": LONG}]})
        half = module._KEPT_BYTES_MAX // 2 - 2000
        kept = [scene.turns.follow(request, prepared, half) for _ in range(3)]
        assert [on_answer is None for on_answer in kept] == [False, False, True]
        kept.clear()
        assert scene.turns.follow(request, prepared, half) is not None, "those were never answered"


async def test_failures_are_counted_and_end_nothing_else() -> None:
    async with scene_of() as scene:
        scene.outcomes = [Unavailable("no worker is left"), ValueError("odd")]
        await scene.answer()
        await scene.ended()
        await scene.answer(content="1 " + LONG)
        await scene.ended()
        assert scene.count("failed") == 2


async def test_a_template_that_refuses_answers_is_counted() -> None:
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}"
    async with scene_of(model(refusing)) as scene:
        await scene.answer("<tool_call>")
        await scene.ended()
        assert (scene.count("refused"), scene.dispatcher.opened) == (1, [])
