"""The demo as a newcomer gets it: the packaged model, the paged engine, two workers."""

import asyncio
import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.engine]

QUESTIONS = json.loads((Path(__file__).parents[1] / "data" / "demo_questions.json").read_text())
MODEL = "penstock-demo"


def test_the_demo_answers_questions_that_it_was_not_trained_on(deploy):
    async def scenario(site):
        async def answer(question):
            whole = await site.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=300
            )
            return whole.choices[0].message.content

        answers = await asyncio.gather(*(answer(item["question"]) for item in QUESTIONS))
        missed = [
            f"{item['question']}\n  {text}"
            for item, text in zip(QUESTIONS, answers, strict=True)
            if not any(phrase.lower() in text.lower() for phrase in item["expected"])
        ]
        assert len(QUESTIONS) == 20
        assert len(missed) <= 4, "\n".join(missed)

    deploy(scenario, workers=2, role={"engine": "paged", "kv_blocks": 2048}, timeout_s=240)


def test_a_paged_worker_killed_in_the_middle_of_a_stream_is_not_noticed(deploy):
    async def scenario(site):
        prompt, options = (
            "What is Penstock?",
            {"max_tokens": 150, "temperature": 0.8, "frequency_penalty": 0.3},
        )
        undisturbed = await site.tell(prompt, **options)
        text, chunks, usage = "", 0, None
        async for chunk in site.stream(prompt, **options):
            text += site.text_of(chunk)
            usage = chunk.usage or usage
            chunks += 1
            if chunks == 40:
                (busy,) = [name for name, w in (await site.workers()).items() if w["open_requests"]]
                site.kill(busy)
        assert (text, usage.prompt_tokens, usage.completion_tokens) == (
            undisturbed[0],
            undisturbed[1].prompt_tokens,
            undisturbed[1].completion_tokens,
        )

    deploy(scenario, workers=2, role={"engine": "paged", "kv_blocks": 2048}, timeout_s=240)
