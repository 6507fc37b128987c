"""Structured output of paged workers through the openai client: valid whole, streamed, disaggregated, and after workers are killed."""

import asyncio
import json

import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from tests.support.tool_talk import FILES

pytest.importorskip("torch")

from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

ASK = [{"role": "user", "content": "List some numbers."}]
NUMBERS = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 150, "maxItems": 150}
    },
    "required": ["numbers"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]
PAGED = {"engine": "paged", "weight_dtype": "float32"}


def valid(text, schema=NUMBERS):
    answer = json.loads(text)
    jsonschema.validate(answer, schema)
    return answer


async def stream(site, **options):
    chunks = await site.client.chat.completions.create(
        model="penstock-demo", messages=ASK, seed=3, stream=True, max_tokens=1200, **options
    )
    async with chunks:
        async for chunk in chunks:
            yield chunk


async def until_alone(site, names):
    """Wait until exactly one of the workers runs a request; returns its name."""
    found = []

    async def holds():
        workers = await site.workers()
        known = [name for name in names if name in workers]
        found[:] = [name for name in known if (workers[name]["load"] or {}).get("running_requests")]
        return len(found) == 1

    await site.until(holds)
    return found[0]


def test_an_answer_stays_valid_when_its_worker_is_killed(deploy):
    async def scenario(site):
        text = ""
        async for chunk in stream(site, response_format=FORMAT):
            text += site.text_of(chunk)
        valid(text)
        again, count = "", 0
        async for chunk in stream(site, response_format=FORMAT):
            again += site.text_of(chunk)
            count += 1
            if count == 20:
                site.kill(await until_alone(site, ("worker-1", "worker-2")))
        assert count > 60
        assert again == text

    deploy(scenario, workers=2, role=PAGED, timeout_s=240)


def test_every_way_to_constrain_an_answer(deploy):
    async def scenario(site):
        create = site.client.chat.completions.create
        common = {"model": "penstock-demo", "messages": ASK, "max_tokens": 400, "seed": 5}

        async def said(**options):
            answer = await create(**common, **options)
            assert answer.choices[0].finish_reason == "stop", answer
            return answer.choices[0].message.content

        whole = await create(**common, response_format={"type": "json_object"})
        assert whole.choices[0].message.content.startswith("{")  # this model writes on and on
        assert await said(extra_body={"structured_outputs": {"choice": ["left", "right"]}}) in {
            "left",
            "right",
        }
        assert await said(extra_body={"guided_choice": ["up", "down"]}) in {"up", "down"}
        assert (await said(extra_body={"guided_regex": "[0-9]{3}-[0-9]{3}"})).replace("-", "").isdigit()
        assert await said(extra_body={"guided_grammar": 'root ::= "yes" | "no"'}) in {"yes", "no"}
        valid(
            await said(extra_body={"guided_json": {"type": "integer", "maximum": 9, "minimum": 0}}),
            {"type": "integer"},
        )
        small = {"type": "json_schema", "json_schema": {"name": "t", "schema": {"enum": ["a", "b"]}}}
        answers = await asyncio.gather(*(said(response_format=small, n=1) for _ in range(8)))
        assert all(valid(answer, {"enum": ["a", "b"]}) for answer in answers)

        both = await create(**common, response_format=FORMAT, n=2, temperature=1.0)
        texts = [choice.message.content for choice in both.choices if choice.finish_reason == "stop"]
        assert all(valid(text) for text in texts)

        for name, value in (
            ("guided_regex", "(("),
            ("guided_json", {"type": "blorp"}),
            ("guided_grammar", "root ::= foo"),
        ):
            for streamed in (False, True):
                with pytest.raises(openai.BadRequestError, match=f"{name}: ") as caught:
                    await create(**common, extra_body={name: value}, stream=streamed)
                assert caught.value.param == name

    deploy(scenario, role=PAGED, timeout_s=240)


@pytest.mark.nightly
def test_prefill_and_decode_workers_share_a_grammar(deploy):
    async def scenario(site):
        text = ""
        async for chunk in stream(site, response_format=FORMAT):
            text += site.text_of(chunk)
        valid(text)
        decode = (await site.workers())["decode-1"]["load"]
        assert decode["generated_tokens"] > 100

    role = {"replicas": 1, **PAGED}
    deploy(
        scenario,
        roles={"prefill": role, "decode": role},
        router={"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}},
        timeout_s=240,
    )


def test_required_and_named_calls_keep_to_their_schemas(deploy, tmp_path):
    path = make_checkpoint(tmp_path / "tooled", "llama")
    (path / "tokenizer_config.json").write_bytes(FILES["tokenizer_config.json"])

    async def scenario(site):
        (model,) = (await site.client.models.list()).data
        common = {"model": model.id, "messages": ASK, "tools": TOOLS, "temperature": 1.0, "max_tokens": 300}
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "time"}}] * 2):
            answer = await site.client.chat.completions.create(
                **common, tool_choice=choice, seed=seed, parallel_tool_calls=False
            )
            (call,) = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
            assert call.function.name == "time" or (choice == "required" and call.function.name == "weather")
            valid(call.function.arguments, TOOLS[0]["function"]["parameters"])

    deploy(scenario, model=str(path), role={"engine": "paged"}, timeout_s=240)


DAY_NUMBERS = {"type": "integer", "minimum": 0, "maximum": 999}
DAYS_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "array", "items": DAY_NUMBERS, "minItems": 12, "maxItems": 12},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
DAYS_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": DAYS_PARAMETERS}}
    for name in ("weather", "time")
]
CALLS_MIN, CALLS_MAX = 3, 8
SEEDS = 60
"""The model is random: some seeds end the array after the first call, and some not within the tokens."""
END_BIAS = -2.0
"""Of the bracket that ends the array, so that most answers have several calls."""


async def calls_of(site, model, seed, bias, *, at_chunk=None):
    """Stream an answer; gives its calls as (id, name, arguments), and its finish reason. `at_chunk` is awaited with each chunk's number."""
    chunks = await site.client.chat.completions.create(
        model=model, messages=ASK, tools=DAYS_TOOLS, tool_choice="required", seed=seed, temperature=1.0, max_tokens=900, logit_bias=bias, stream=True
    )  # fmt: skip
    calls, reason, count = [], None, 0
    async with chunks:
        async for chunk in chunks:
            (choice,) = chunk.choices
            assert not choice.delta.content
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls)
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments or ""
            reason = choice.finish_reason or reason
            count += 1
            if at_chunk is not None:
                await at_chunk(count)
    return calls, reason, count


def test_parallel_calls_survive_two_killed_workers(deploy, tmp_path):
    path = make_checkpoint(tmp_path / "tooled", "llama", max_position_embeddings=2048)
    (path / "tokenizer_config.json").write_bytes(FILES["tokenizer_config.json"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    bias = {tokenizer.token_to_id("]"): END_BIAS}

    async def scenario(site):
        (model,) = (await site.client.models.list()).data
        for seed in range(SEEDS):
            whole, reason, count = await calls_of(site, model.id, seed, bias)
            if reason == "tool_calls" and CALLS_MIN <= len(whole) <= CALLS_MAX:
                break
        else:
            pytest.fail(f"no seed below {SEEDS} makes {CALLS_MIN} to {CALLS_MAX} calls")
        left, killed = ["worker-1", "worker-2", "worker-3"], []

        async def kill(number):
            if number in (count // 4, count // 2):
                name = await until_alone(site, left)
                left.remove(name)
                killed.append(name)
                site.kill(name)

        again, reason, _ = await calls_of(site, model.id, seed, bias, at_chunk=kill)
        assert len(killed) == 2
        assert reason == "tool_calls"
        assert [call[1:] for call in again] == [call[1:] for call in whole]
        assert len({call_id for call_id, _, _ in again}) == len(again)
        for _, name, arguments in again:
            assert name in {"weather", "time"}
            jsonschema.validate(json.loads(arguments), DAYS_PARAMETERS)

    deploy(
        scenario,
        model=str(path),
        workers=3,
        role={"engine": "paged", "weight_dtype": "float32"},
        timeout_s=400,
    )
