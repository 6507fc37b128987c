"""The head of prompts: noise of clients left out, other text that changes reported."""

import json

import pytest
from structlog.testing import capture_logs

from penstock.frontend.apis.bodies import ChatRequest, Message, parse_chat
from penstock.frontend.apis.messages_body import parse_messages
from penstock.frontend.encoding import ChangingHeads, encode_prompts, head_of
from penstock.frontend.text.models import ServedModel
from tests.support.tokenizer import tiny_card, tiny_model_files

NOISE = "x-anthropic-billing-header: cc_version=2.1.{0}; cc_entrypoint=cli; cch={0};"
RULES = "You are a client."
USER = [{"role": "user", "content": "hi"}]
MODEL = ServedModel(tiny_card(), tiny_model_files())


def anthropic(number: int, *, one_text: bool) -> ChatRequest:
    texts = [NOISE.format(number), RULES]
    system = "\n".join(texts) if one_text else [{"type": "text", "text": text} for text in texts]
    body = {"model": "m", "max_tokens": 5, "system": system, "messages": USER}
    return parse_messages(json.dumps(body).encode()).request


def openai(number: int, *, one_text: bool) -> ChatRequest:
    texts = [NOISE.format(number), RULES]
    content = "\n".join(texts) if one_text else [{"type": "text", "text": text} for text in texts]
    body = {"model": "m", "messages": [{"role": "system", "content": content}, *USER]}
    return parse_chat(json.dumps(body).encode())


@pytest.mark.parametrize("one_text", [False, True])
@pytest.mark.parametrize("body", [anthropic, openai])
def test_what_a_client_is_billed_by_is_no_part_of_the_prompt(body, one_text) -> None:
    prompts = {
        encode_prompts(body(number, one_text=one_text), MODEL, bytes(16))[0].token_ids for number in (1, 22)
    }
    plain = [Message(role="system", content=RULES), Message(role="user", content="hi")]
    assert prompts == {encode_prompts(ChatRequest(model="m", messages=plain), MODEL, bytes(16))[0].token_ids}


def test_a_head_that_changes_with_each_request_is_told_of() -> None:
    counted: list[str] = []
    heads = ChangingHeads(counted.append)

    def see(head: str, rest: str = "r" * 3000) -> None:
        found = head_of([Message(role="system", content=f"time {head}\n{rest}")])
        if found is not None:
            heads.saw("m", "", found)

    for _ in range(5):
        see("1")
        see("2")
        see("3", "short")
        see("4", "s" * 3000)
    assert not counted
    with capture_logs() as logs:
        for head in "3456":
            see(head)
            see("1")
    assert counted == ["m"] * 4
    assert [(each["event"], each["same_characters"]) for each in logs] == [("prompt_head_changes", 5)]
