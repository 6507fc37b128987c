"""Whether answers stay the same: the same questions on aggregated, disaggregated and dying workers of one engine.

Questions are asked one after the other, with greedy decoding; each is scored by a phrase that its answer must have. The disaggregated
deployment computes every prompt in its prefill worker. In the third deployment the worker that answers is killed with
SIGKILL in the middle of each answer. The fourth, of engines with KV tiers, has few blocks on the device; every question is
asked twice, and the KV of the second time comes from the host tier. Scores must be equal, and so must all tokens.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

import msgspec

from benchmarks.processes.asking import Answer, Asker
from benchmarks.processes.served import Served, served
from benchmarks.runner import expect_at_least
from penstock.bench.report import BenchReport
from penstock.core.errors import ConfigError, Unavailable
from penstock.engine.registry import engine_kind

_QUESTIONS = Path(__file__).parents[2] / "tests" / "data" / "demo_questions.json"
_QUICK_QUESTIONS = 3
_OFFLOADED_QUESTIONS = 20
_READY_TIMEOUT_S = 600.0
"""For a worker that was killed. A vLLM takes half a minute on two cores of its own, and several where others work."""
_MIGRATED_SHARE_MIN = 0.75
"""Of the answers, that must have been under way when their worker was killed: some end before the signal arrives."""
_EVERY_PROMPT_REMOTE = (
    "--set",
    "router.disagg.remote_tokens_min=1",
    "--set",
    "router.disagg.local_tokens_max=0",
)
_DEPLOYMENTS = {
    "aggregated": ("--workers", "1"),
    "disaggregated": ("--prefill", "1", "--decode", "1", *_EVERY_PROMPT_REMOTE),
    "migrated": ("--workers", "2", "--set", "supervision.restart_delay_max_s=0.2"),
    "offloaded": ("--workers", "1", "--set", "roles.aggregated.kv_blocks=16", "--kv-host", "100x"),
}
_MOCK_WITH_KV = (
    "--set",
    "roles.aggregated.mock.kv_bytes_per_block=256",
    "--set",
    "roles.aggregated.mock.timing.prefill_s_per_token=5e-4",
)
"""A mock engine that has KV to copy, and computes it more slowly than any copy."""


class Question(msgspec.Struct, frozen=True):
    """`expected`: phrases of which the answer must have one, in upper or lower case."""

    question: str
    expected: list[str]

    def is_answered_by(self, text: str) -> bool:
        return any(phrase.lower() in text.lower() for phrase in self.expected)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answers of one deployment, and what its router and workers counted meanwhile."""

    answers: list[Answer]
    migrations: int
    remote_prefills: int
    kv_bytes: int
    onboarded_tokens: int
    kv_failures: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="paged", metavar="NAME", help="of all workers (default paged)")
    parser.add_argument("--model", metavar="MODEL", help="directory or hub name (default: the demo model)")
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="as of `penstock serve`"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PLACE=VALUE", help="as of `penstock serve`"
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        default=_QUESTIONS,
        help="JSON list of {question, expected: [phrase, ...]} (default: the demo model's)",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="ask only the first N questions (default: all)"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=128, metavar="O", help="most tokens of an answer (default 128)"
    )


def run(options: argparse.Namespace) -> BenchReport:
    """Ask all questions on each deployment.

    Raises:
        ConfigError: the questions cannot be read, or an option makes no sense.
        Unavailable: a deployment does not start, or a killed worker does not come back.
    """
    expect_at_least(options, output_tokens=2, limit=1)
    known_questions = _read(options.questions)
    questions = known_questions[: _QUICK_QUESTIONS if options.quick else options.limit]
    outcomes: dict[str, Outcome] = {}
    for name, of_all in _DEPLOYMENTS.items():
        if name == "offloaded" and not engine_kind(options.engine).has_kv_tiers:
            continue
        begun_s = perf_counter()
        flags = of_all + _MOCK_WITH_KV if name == "offloaded" and options.engine == "mock" else of_all
        known = outcomes["aggregated"].answers if name == "migrated" else None
        with served(*_common(options), *flags, spare_processes=int(name == "migrated")) as deployment:
            if name == "offloaded":
                # those that follow evict the first ones from the device
                _ask(deployment, known_questions[:_OFFLOADED_QUESTIONS], options.output_tokens, None)
            outcomes[name] = _ask(deployment, questions, options.output_tokens, known)
        _say(f"{name}: {len(questions)} questions in {perf_counter() - begun_s:.0f} s, its start included")
    figures, problems = judge(questions, outcomes)
    return BenchReport(
        name="eval",
        config={
            "engine": options.engine,
            "model": options.model or "demo",
            "engine_args": options.engine_arg,
            "set": options.set,
            "questions": options.questions.name,
            "limit": options.limit,
            "output_tokens": options.output_tokens,
            "quick": options.quick,
        },
        figures=figures,
        samples={f"tokens_{name}": [len(a.tokens) for a in one.answers] for name, one in outcomes.items()},
        problems=problems,
    )


def _read(path: Path) -> list[Question]:
    try:
        questions = msgspec.json.decode(path.read_bytes(), type=list[Question])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--questions: {path}: {error}; expected a JSON list of {{question, expected}}"
        ) from error
    if not questions:
        raise ConfigError(f"--questions: {path}: there is no question in it")
    return questions


def _common(options: argparse.Namespace) -> Iterator[str]:
    yield from [options.model] if options.model else ["--demo"]
    yield from ("--engine", options.engine, "--log-level", "error")
    for argument in options.engine_arg:
        yield from ("--engine-arg", argument)
    for setting in options.set:
        yield from ("--set", setting)


def _ask(
    deployment: Served, questions: Sequence[Question], output_tokens: int, known: Sequence[Answer] | None
) -> Outcome:
    """Ask all questions; with `known` answers, kill the worker at the middle of each."""
    asker = Asker(deployment, output_tokens)
    answers = []
    for index, question in enumerate(questions):
        if known is None:
            answers.append(asker.ask(question.question))
            continue
        _wait_for_workers(asker)
        _say(f"migrated: question {index + 1} of {len(questions)}")
        middle = len(known[index].tokens) // 2
        answers.append(asker.ask(question.question, kill_after=max(1, middle)))
    counts = asker.counts()
    loads = [worker.load for worker in asker.workers() if worker.load]
    return Outcome(
        answers,
        migrations=int(counts.get('penstock_router_migrations_total{outcome="moved"}', 0)),
        remote_prefills=int(counts.get('penstock_router_prefills_total{place="remote"}', 0)),
        kv_bytes=sum(read.num_bytes for load in loads for read in load.kv_reads),
        onboarded_tokens=sum(sum(load.onboarded_tokens) for load in loads),
        kv_failures=sum(load.kv_failures for load in loads),
    )


def _say(text: str) -> None:
    print(f"benchmarks eval: {text}", file=sys.stderr, flush=True)


def _wait_for_workers(asker: Asker) -> None:
    """Wait until both workers serve, so that the next kill leaves one."""
    waited_s = 0.0
    while sum(worker.condition == "ready" for worker in asker.workers()) < 2:
        if waited_s > _READY_TIMEOUT_S:
            raise Unavailable(f"a killed worker is not back after {_READY_TIMEOUT_S:g} s")
        sleep(0.05)
        waited_s += 0.05


def judge(questions: Sequence[Question], outcomes: dict[str, Outcome]) -> tuple[dict[str, float], list[str]]:
    """Give the figures, and what must not be."""
    figures: dict[str, float] = {"eval_questions": len(questions)}
    problems = []
    expected = [answer.tokens for answer in outcomes["aggregated"].answers]
    figures["eval_tokens"] = total = sum(map(len, expected))
    for name, outcome in outcomes.items():
        right = [q.is_answered_by(a.text) for q, a in zip(questions, outcome.answers, strict=True)]
        figures[f"eval_score_{name}"] = sum(right) / len(right)
        if name == "aggregated":
            continue
        found = [answer.tokens for answer in outcome.answers]
        equal = sum(_equal(*pair) for pair in zip(found, expected, strict=True))
        figures[f"eval_equal_tokens_{name}_share"] = equal / total
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        figures[f"eval_equal_answers_{name}_share"] = same / len(found)
        if same < len(found):
            problems.append(
                f"{name}: {len(found) - same} of {len(found)} answers differ from the aggregated ones"
            )
        if figures[f"eval_score_{name}"] != figures["eval_score_aggregated"]:
            problems.append(f"{name}: the score differs from the aggregated one")
    moved, disaggregated = outcomes["migrated"].migrations, outcomes["disaggregated"]
    figures["eval_migrations"] = moved
    figures["eval_remote_prefills"] = disaggregated.remote_prefills
    figures["eval_kv_bytes"] = disaggregated.kv_bytes
    figures["eval_kv_failures"] = disaggregated.kv_failures
    if "offloaded" in outcomes:
        figures["eval_onboarded_tokens"] = outcomes["offloaded"].onboarded_tokens
        if not outcomes["offloaded"].onboarded_tokens:
            problems.append("offloaded: no KV came from the host tier")
    if moved < _MIGRATED_SHARE_MIN * len(questions):
        problems.append(f"migrated: only {moved} of {len(questions)} answers lost their worker in the middle")
    if disaggregated.remote_prefills < len(questions):
        problems.append(
            f"disaggregated: only {disaggregated.remote_prefills} of {len(questions)} prompts went to the prefill worker"
        )
    if disaggregated.kv_failures:
        problems.append(
            f"disaggregated: {disaggregated.kv_failures} prompts were computed by the decode worker, as their KV did not come"
        )
    return figures, problems


def _equal(found: Sequence[str], expected: Sequence[str]) -> int:
    """Count equal tokens up to the first difference."""
    pairs = zip(found, expected, strict=False)
    shorter = min(len(found), len(expected))
    return next((index for index, (one, other) in enumerate(pairs) if one != other), shorter)
