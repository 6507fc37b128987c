"""Answers that keep to a schema, a regular expression or a choice."""

import json
import re

import pytest
from tokenizers import Tokenizer

from penstock.core.errors import EngineError, RequestError
from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens

pytestmark = pytest.mark.nightly

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["color", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def request_of(name, structured, **fields):
    sampling = SamplingParams(max_tokens=100, temperature=0.0, structured=json.dumps(structured).encode())
    return Request(
        request_id=name, model="tiny", token_ids=pack_tokens(range(20, 60)), sampling=sampling, **fields
    )


def test_answers_keep_to_what_was_asked(running, tokenizer):
    asked = {
        "schema": {"json": SCHEMA},
        "regex": {"regex": "[ab]{3}-[0-9]{2}"},
        "choice": {"choice": ["yes", "no"]},
    }
    answers = running.answers(*(request_of(name, each) for name, each in asked.items()))
    texts = [tokenizer.decode(answer.token_ids) for answer in answers]
    found = json.loads(texts[0])
    assert set(found) == {"color", "count"}
    assert found["color"] in {"red", "blue"}
    assert re.fullmatch("[ab]{3}-[0-9]{2}", texts[1])
    assert texts[2] in {"yes", "no"}
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}


def test_a_schema_that_vllm_cannot_use_is_the_callers_error(running):
    with pytest.raises(RequestError) as refused:
        running.answers(request_of("bad", {"json": {"type": "nonsense"}}))
    assert refused.value.param == "response_format"
    with pytest.raises(RequestError, match="vLLM: "):
        running.answers(request_of("worse", {"regx": "a"}))
    assert running.load().waiting_requests == 0


def test_a_constrained_answer_is_not_continued_elsewhere(running):
    with pytest.raises(EngineError, match="cannot continue an answer that response_format constrains"):
        running.answers(request_of("moved", {"json": SCHEMA}, num_emitted=3))
