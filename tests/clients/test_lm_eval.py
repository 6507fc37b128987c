"""lm-eval's own commands, with tasks made here: nothing is fetched."""

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.processes.served import Served
from penstock.demo import MODEL_DIR
from tests.support.clients import run_command

QUESTIONS = ["What is Penstock?", "What does the router do?", "What is a prefix cache?", "Who are you?"]
UNTIL = ["\n"]


def greedy(demo: Served, question: str, *, is_chat: bool) -> str:
    """Give what the model says to a question, as lm-eval asks it."""
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none") as client:
        ask: dict[str, Any] = {
            "model": demo.model,
            "temperature": 0,
            "max_tokens": 12,
            "stop": UNTIL,
            "seed": 1234,
        }
        if is_chat:
            messages = [{"role": "user", "content": question}]
            return client.chat.completions.create(messages=messages, **ask).choices[0].message.content
        return client.completions.create(prompt=question, **ask).choices[0].text


def evaluate(folder: Path, demo: Served, model: str, path: str, *flags: str) -> dict[str, Any]:
    """Run the task in `folder`; returns its results."""
    arguments = (
        f"model={demo.model},base_url={demo.url}{path},tokenizer={MODEL_DIR},num_concurrent=2,max_retries=1"
    )
    command = ["run", "--model", model, "--tasks", "tiny", "--include_path", str(folder), *flags]
    command += ["--model_args", arguments, "--output_path", str(folder / "out")]
    asyncio.run(run_command("evals", command, command="lm_eval", folder=folder, timeout_s=300))
    (results,) = (folder / "out").rglob("results_*.json")
    return json.loads(results.read_text())["results"]["tiny"]


@pytest.mark.slow
@pytest.mark.needs("evals clients")
@pytest.mark.parametrize(
    ("model", "path", "flags"),
    [
        ("local-chat-completions", "/v1/chat/completions", ["--apply_chat_template"]),
        ("local-completions", "/v1/completions", []),
    ],
)
def test_generated_answers_are_scored(
    demo: Served, tmp_path: Path, model: str, path: str, flags: list[str]
) -> None:
    answers = [greedy(demo, question, is_chat="chat" in path) for question in QUESTIONS]
    answers[-1] = "something else"  # so that one of them is wrong
    items = [
        {"question": one, "answer": other.strip()} for one, other in zip(QUESTIONS, answers, strict=True)
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(tmp_path / "items.jsonl")},
        "test_split": "train",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": UNTIL, "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [
            {"metric": "exact_match", "ignore_case": False, "regexes_to_ignore": ["^\\s+", "\\s+$"]}
        ],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))  # JSON is YAML
    assert evaluate(tmp_path, demo, model, path, *flags)["exact_match,none"] == 0.75
