"""lm-eval, aiperf and guidellm with their own commands, and tasks made here: nothing is fetched."""

import asyncio
import json
import math
from collections.abc import Iterable
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


def evaluate(
    folder: Path,
    demo: Served,
    items: Iterable[dict[str, Any]],
    task: dict[str, Any],
    *flags: str,
    model: str = "local-completions",
    path: str = "/v1/completions",
    tokenizer: str = f"tokenizer={MODEL_DIR}",
) -> dict[str, Any]:
    """Run a task with these items; returns its results."""
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    where = {"dataset_path": "json", "dataset_kwargs": {"data_files": str(folder / "items.jsonl")}}
    whole = {"task": "tiny", "test_split": "train"} | where | task
    (folder / "tiny.yaml").write_text(json.dumps(whole))  # JSON is YAML
    arguments = f"model={demo.model},base_url={demo.url}{path},{tokenizer},num_concurrent=2,max_retries=1"
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
    items = ({"question": one, "answer": two.strip()} for one, two in zip(QUESTIONS, answers, strict=True))
    task = {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": UNTIL, "max_gen_toks": 12, "do_sample": False, "temperature": 0},
        "metric_list": [
            {"metric": "exact_match", "ignore_case": False, "regexes_to_ignore": ["^\\s+", "\\s+$"]}
        ],
    }
    found = evaluate(tmp_path, demo, items, task, *flags, model=model, path=path)
    assert found["exact_match,none"] == 0.75


class Reference:
    """The demo model's own log-likelihoods, by transformers in float32."""

    def __init__(self) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        self._torch = torch
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def loglikelihood(self, context: list[int], rest: list[int]) -> float:
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([context + rest])).logits[0, len(context) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        return sum(float(row[token]) for row, token in zip(logprobs, rest, strict=True))

    def prefix(self) -> list[int]:
        """What lm-eval puts before a text without context."""
        token = self._tokenizer.bos_token_id
        return [self._tokenizer.eos_token_id if token is None else token]


CHOICES = [" Yes, it does.", " A worker keeps KV.", " zebra zebra", " The router."]
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer",
    [f"tokenizer={MODEL_DIR}", pytest.param("tokenizer_backend=remote", marks=pytest.mark.nightly)],
    ids=["local", "remote"],
)


@pytest.mark.slow
@pytest.mark.needs("evals clients")
@TOKENIZERS
def test_multiple_choice_is_decided_as_by_the_model_itself(
    demo: Served, tmp_path: Path, tokenizer: str
) -> None:
    reference = Reference()
    chosen = []
    for question in QUESTIONS:
        context = reference.ids(question)
        likely = [
            reference.loglikelihood(context, reference.ids(question + choice)[len(context) :])
            for choice in CHOICES
        ]
        chosen.append(likely.index(max(likely)))
    chosen[-1] = (chosen[-1] + 1) % len(CHOICES)  # so that one of them is wrong
    items = ({"question": one, "answer": answer} for one, answer in zip(QUESTIONS, chosen, strict=True))
    task = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": CHOICES,
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = evaluate(tmp_path, demo, items, task, tokenizer=tokenizer)
    assert found["acc,none"] == 0.75


@pytest.mark.slow
@pytest.mark.needs("evals clients")
@TOKENIZERS
def test_perplexity_is_the_models_own(demo: Served, tmp_path: Path, tokenizer: str) -> None:
    reference = Reference()
    texts = [" ".join(QUESTIONS), " ".join(["A router sends each request to a worker."] * 20), "Penstock"]
    task = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    found = evaluate(tmp_path, demo, ({"text": text} for text in texts), task, tokenizer=tokenizer)
    nats = -sum(reference.loglikelihood(reference.prefix(), reference.ids(text)) for text in texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte,none"] == pytest.approx(
        nats / num_bytes / math.log(2), rel=5e-3
    )  # in bfloat16


REQUESTS, TOKENS = 6, 8


@pytest.mark.slow
@pytest.mark.needs("aiperf clients")
@pytest.mark.parametrize(
    "endpoint",
    ["chat", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("responses", "messages"))],
)
def test_aiperf(demo: Served, tmp_path: Path, endpoint: str) -> None:
    flags = {
        "model": demo.model,
        "url": demo.url,
        "endpoint-type": endpoint,
        "tokenizer": str(MODEL_DIR),
        "concurrency": "2",
        "request-count": str(REQUESTS),
        "synthetic-input-tokens-mean": "20",
        "output-tokens-mean": str(TOKENS),
        "extra-inputs": "ignore_eos:true",
        "ui": "none",
        "output-artifact-dir": str(tmp_path),
    }
    arguments = [
        "profile",
        "--streaming",
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
    ]
    said = asyncio.run(run_command("aiperf", arguments, command="aiperf", folder=tmp_path, timeout_s=300))
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS, said
    assert not found["error_summary"], said
    assert found["time_to_first_token"]["avg"] > 0
    assert found["output_sequence_length"]["avg"] <= TOKENS + 1


@pytest.mark.slow
@pytest.mark.needs("evals clients")
def test_guidellm(demo: Served, tmp_path: Path) -> None:
    flags = {
        "backend": f"kind=openai_http,target={demo.url},model={demo.model}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL_DIR}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
        "output": f"kind=json,path={tmp_path / 'out.json'}",
    }
    arguments = [
        "run",
        "--disable-console",
        *(part for name, value in flags.items() for part in (f"--{name}", value)),
    ]
    said = asyncio.run(run_command("evals", arguments, command="guidellm", folder=tmp_path, timeout_s=300))
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0), said
    answered = benchmark["requests"]["successful"]
    assert {request["output_metrics"]["text_tokens"] for request in answered} == {TOKENS}, said
