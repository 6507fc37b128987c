"""What the tests of the paged engine share: tiny checkpoints, their reference outputs, and an engine run by hand."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.hashing import DEFAULT_KEY
from penstock.core.types.events import KvEvent
from penstock.core.types.requests import PromptLogprobs, Request, SamplingParams, TokenLogprob
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import SequenceLimits
from penstock.kv.pool import BlockPool

PROMPT_TOKENS = (3, 150)
NUM_PROMPTS = 32
NEW_TOKENS = 16


def make_request(
    name: str, token_ids: Iterable[int], max_tokens: int = NEW_TOKENS, *, num_emitted: int = 0, **params: Any
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **params})
    return Request(
        request_id=name,
        model="m",
        token_ids=pack_tokens(token_ids),
        sampling=sampling,
        num_emitted=num_emitted,
    )


@dataclass
class ManualEngine:
    """A `PagedRunner` with its scheduler and pool, stepped without an event loop."""

    runner: Any
    scheduler: Scheduler
    pool: BlockPool
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[PromptLogprobs]] = field(default_factory=dict)
    events: list[KvEvent] = field(default_factory=list)
    mixed_steps: int = 0
    chunks: int = 0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.tokens[request.request_id] = []
            self.logprobs[request.request_id] = []
            self.scheduler.submit(request)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.mixed_steps += 0 < plan.num_decode < len(plan.slots)
        self.chunks += int(np.count_nonzero(~plan.samples))
        step = self.scheduler.commit(plan, self.runner.run(plan, self.scheduler.table))
        for delta in step.deltas:
            assert delta.error is None, delta.error
            self.tokens[delta.request_id] += unpack_tokens(delta.token_ids).tolist()
            self.logprobs[delta.request_id] += delta.logprobs
            if delta.prompt_logprobs:
                self.prompt_logprobs.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            if delta.embedding:
                self.embeddings[delta.request_id] = delta.embedding
        self.events += step.events
        self.scheduler.check()
        return True

    def run(self, *requests: Request, concurrency: int = 1000) -> dict[str, list[int]]:
        """Run requests to their end, so many at once."""
        waiting = list(requests)
        while True:
            load = self.scheduler.load()
            room = concurrency - load.running_requests - load.waiting_requests
            self.submit(*waiting[:room])
            del waiting[:room]
            if not self.step() and not waiting:
                return self.tokens


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Give the directory of a tiny random checkpoint of an architecture."""
    from tests.support.checkpoints import make_checkpoint

    return functools.cache(
        lambda architecture: make_checkpoint(tmp_path_factory.mktemp(architecture), architecture)
    )


@pytest.fixture
def engine(checkpoint) -> Callable[..., ManualEngine]:
    """Make an engine; settings are of the runner, or of the scheduler."""
    from penstock.engine.paged.memory import PagedConfig
    from penstock.engine.paged.runner import PagedRunner

    def make(architecture: str = "llama", **settings: Any) -> ManualEngine:
        scheduling = {key: settings.pop(key) for key in list(settings) if key in SchedulerConfig.model_fields}
        parts = {key: settings.pop(key) for key in ("make_fence",) if key in settings}
        scheduler_config = SchedulerConfig(**scheduling)
        config = {"model": str(checkpoint(architecture)), "kv_blocks": 400, "block_size": 8} | settings
        runner = PagedRunner(PagedConfig(**config), **parts)
        info = runner.start()
        pool = BlockPool(info.num_blocks, info.block_size)
        limits = SequenceLimits(
            block_size=info.block_size,
            model_context_length=info.context_length,
            kv_tokens=info.windows.tokens_beside(
                info.num_blocks, scheduler_config.prompt_budget, info.block_size
            ),
            vocab_size=info.vocab_size,
            hash_key=DEFAULT_KEY,
            windows=info.windows,
            groups=info.groups,
        )
        scheduler = Scheduler(pool, limits, scheduler_config, eos_token_ids=info.eos_token_ids)
        return ManualEngine(runner, scheduler, pool)

    return make


class Reference:
    """Prompts, and what transformers' own greedy `generate` adds to each."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._outputs: dict[int, list[int]] = {}
        random = np.random.default_rng(7)
        lengths = random.integers(*PROMPT_TOKENS, NUM_PROMPTS)
        self.prompts = [random.integers(2, 512, length).tolist() for length in lengths]

    def requests(self, count: int = NUM_PROMPTS, **params: Any) -> list[Request]:
        return [
            make_request(str(index), prompt, **params) for index, prompt in enumerate(self.prompts[:count])
        ]

    def check(self, tokens: dict[str, list[int]], count: int = NUM_PROMPTS) -> None:
        assert len(tokens) == count
        for name, output in tokens.items():
            assert output == self.output(int(name)), f"request {name}"

    def output(self, index: int) -> list[int]:
        if index not in self._outputs:
            self._outputs[index] = self._generate(self.prompts[index])
        return self._outputs[index]

    def _generate(self, prompt: list[int]) -> list[int]:
        import torch

        token_ids = torch.tensor([prompt])
        output = self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def reference(checkpoint) -> Callable[[str], Reference]:
    """Give the reference of an architecture."""
    return functools.cache(lambda architecture: Reference(checkpoint(architecture)))


@pytest.fixture(scope="session")
def reference_at() -> Callable[[Path], Reference]:
    """Give the reference of any checkpoint."""
    return Reference


@pytest.fixture(scope="session")
def new_request() -> Callable[..., Request]:
    return make_request
