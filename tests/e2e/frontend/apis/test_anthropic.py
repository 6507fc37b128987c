"""The Anthropic API through its own client, whole and streamed."""

import json

import anthropic
import pytest
from frontend_site import HI, IDS, TEXT, TOKENIZER, Site, of_keys, serving

from penstock.core.types.requests import FinishReason
from penstock.core.wire import token_list
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card
from tests.support.tool_talk import FILES


def client(site: Site, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{site.port}", api_key=key, max_retries=0)


def prompt_of(site: Site, index: int = -1) -> str:
    return TOKENIZER.decode(token_list(site.dispatcher.opened[index].token_ids), skip_special_tokens=False)


async def test_a_message_is_answered_whole_and_streamed() -> None:
    async with serving(tenants=of_keys("secret")) as site, client(site, "secret") as api:
        whole = await api.messages.create(
            model="tiny", max_tokens=50, messages=HI, system="be brief", extra_body={"top_k": 5}
        )
        assert [block.text for block in whole.content] == [TEXT]
        assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", "tiny")
        assert whole.usage.input_tokens == len(token_list(site.dispatcher.opened[0].token_ids))
        assert whole.usage.output_tokens == len(IDS) + 1
        assert prompt_of(site) == "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
        async with api.messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == TEXT
        assert len(texts) > 2
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == whole.usage.output_tokens


async def test_stop_sequences_and_lengths_are_told() -> None:
    async with serving() as site, client(site) as api:
        stopped = await api.messages.create(
            model="tiny", max_tokens=50, messages=HI, stop_sequences=["brown"]
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "brown")
        assert stopped.content[0].text == "the quick "
    card = tiny_card(files=FILES)
    dispatcher = ScriptedDispatcher(speak(IDS, finish=FinishReason.LENGTH), [card], FILES)
    async with serving(dispatcher=dispatcher) as site, client(site) as api:
        cut = await api.messages.create(model="tiny", max_tokens=len(IDS), messages=HI)
        assert cut.stop_reason == "max_tokens"


async def test_tokens_are_counted() -> None:
    async with serving() as site, client(site) as api:
        counted = await api.messages.count_tokens(model="tiny", messages=HI)
        await api.messages.create(model="tiny", max_tokens=5, messages=HI)
        assert counted.input_tokens == len(token_list(site.dispatcher.opened[0].token_ids))


async def test_refusals_have_the_apis_shape() -> None:
    async with serving(tenants=of_keys("secret")) as site, client(site, "secret") as api:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await api.messages.create(model="none", max_tokens=5, messages=HI)
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: must be >= 1, got -5"):
            await api.messages.create(model="tiny", max_tokens=-5, messages=HI)
        search = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
        assert (await api.messages.create(model="tiny", max_tokens=5, messages=HI, **search)).content
        named = search | {"tool_choice": {"type": "tool", "name": "web_search"}}
        with pytest.raises(
            anthropic.BadRequestError,
            match=r"tool_choice.name: must be one of tools, of which there are none",
        ):
            await api.messages.create(model="tiny", max_tokens=5, messages=HI, **named)
        for method, path, status in (
            ("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404), ("GET", "/v1/messages/x/y", 404),
        ):  # fmt: skip
            answer = await site.ask(method, path, b"", "X-API-Key: secret")
            assert (answer.status, json.loads(answer.body)["type"]) == (status, "error"), path
        async with client(site, "wrong") as other:
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(model="tiny", max_tokens=5, messages=HI)
        models = [model.id async for model in api.models.list()]
        assert models == ["tiny"]
