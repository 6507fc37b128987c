"""A model whose chat template takes tools, and an answer of it with reasoning and tool calls."""

import json
import struct
from collections.abc import AsyncIterator, Sequence

from tokenizers import Tokenizer

from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import token_list
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card, tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|assistant|>"
)
FILES = {
    "tokenizer.json": tiny_tokenizer_json(),
    "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode(),
}
PARIS = '{"city": "Paris é"}'
SAID = (
    f'<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
)


def says(text: str, *, at_once: int = 1, context_length: int = 4096) -> ScriptedDispatcher:
    """Make a dispatcher whose every answer is this text."""
    ids: Sequence[int] = [*TOKENIZER.encode(text).ids, 0]
    card = tiny_card(files=FILES, context_length=context_length)
    return ScriptedDispatcher(speak(ids, finish=FinishReason.STOP, at_once=at_once), [card], FILES)


def cut(text: str, *, at_once: int = 1) -> ScriptedDispatcher:
    """Make a dispatcher whose every answer is this text, and then ends at its limit of tokens."""
    script = speak(TOKENIZER.encode(text).ids, finish=FinishReason.LENGTH, at_once=at_once)
    return ScriptedDispatcher(script, [tiny_card(files=FILES, context_length=4096)], FILES)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
AFTER = "It is sunny in Paris."
FACT = '{"city": "Paris", "days": 3}'


def agent() -> ScriptedDispatcher:
    """Make a model that calls the tool `weather` where it has tools, speaks of its result, and keeps to a format with `FACT`.

    Its embeddings are all (3, 4).
    """

    async def embed(request: Request) -> AsyncIterator[Delta]:
        embedding = struct.pack("<2f", 3.0, 4.0)
        yield Delta(request_id=request.request_id, finish_reason=FinishReason.LENGTH, embedding=embedding)

    def script(request: Request) -> AsyncIterator[Delta]:
        if request.embeds:
            return embed(request)
        prompt = TOKENIZER.decode(token_list(request.token_ids), skip_special_tokens=False)
        if request.sampling.structured is not None:
            text = FACT
        elif '"weather"' in prompt and "<|tool|>" not in prompt:
            text = CALL
        else:
            text = AFTER
        return speak([*TOKENIZER.encode(text).ids, 0], finish=FinishReason.STOP)(request)

    return ScriptedDispatcher(script, [tiny_card(files=FILES, context_length=16384)], FILES)
