"""Tests against a real vLLM on the CPU: `make test-vllm` runs them in an environment of their own."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.core.ids import RequestId
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, PromptLogprobs, Request, TokenLogprob
from penstock.core.wire import unpack_tokens
from penstock.engine.registry import create_engine
from penstock.engine.spec import EngineSpec
from penstock.seams import Engine
from tests.vllm.servers import own_cores

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []

BLOCK = 32
TIMEOUT_S = 300.0
RANK, ALPHA = 4, 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own


@dataclass
class Answer:
    """What an engine said of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    last: Delta | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.last is None else self.last.finish_reason


class Running:
    """A started engine, whose steps are consumed by `answers`."""

    def __init__(self, engine: Any, runner: asyncio.Runner) -> None:
        self.engine = engine
        self.info: Any = None
        """Its `EngineInfo`, once it has started."""
        self._runner = runner
        self._steps: AsyncIterator[Step] = engine.steps()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(TIMEOUT_S):
                return await work

        return self._runner.run(limited())

    async def next_step(self) -> Step:
        return await anext(self._steps)

    def load(self) -> WorkerLoad:
        return self._here(self.engine.load)

    def abort(self, request_id: RequestId) -> None:
        self._here(lambda: self.engine.abort(request_id))

    def _here(self, call: Callable[[], Any]) -> Any:
        async def on_the_loop() -> Any:
            return call()

        return self._runner.run(on_the_loop())

    def answers(self, *requests: Request, steps: int | None = None) -> list[Answer]:
        """Submit requests and consume steps until all have ended, or so many steps."""
        return self.do(self._answers(requests, steps))

    async def _answers(self, requests: Sequence[Request], steps: int | None) -> list[Answer]:
        answers = {request.request_id: Answer() for request in requests}
        for request in requests:
            self.engine.submit(request)
        done = 0
        while any(answer.last is None for answer in answers.values()) and done != steps:
            done += 1
            for delta in (await self.next_step()).deltas:
                answer = answers[delta.request_id]
                answer.token_ids += unpack_tokens(delta.token_ids).tolist()
                answer.logprobs += delta.logprobs
                answer.prompt_logprobs += delta.prompt_logprobs
                if delta.cached_tokens is not None:
                    answer.cached_tokens = delta.cached_tokens
                if delta.finish_reason is not None:
                    assert answer.last is None, "two last deltas"
                    answer.last = delta
        return list(answers.values())


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """Undo what engines of a module set for vLLM: processes that later tests start would all take its ports."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights: 256 wide, 4 layers, float32."""
    from tests.support.checkpoints import make_checkpoint

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-llama", "llama", **sizes)


@pytest.fixture(scope="session")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the query projections of all layers, as PEFT saves it."""
    import torch
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("adapter")
    config = json.loads((model_dir / "config.json").read_text())
    generator = torch.Generator().manual_seed(5)
    width = config["num_attention_heads"] * config["head_dim"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = 0.2 * torch.randn(RANK, config["hidden_size"], generator=generator)
        tensors[f"{name}.lora_B.weight"] = 0.2 * torch.randn(width, RANK, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(peft | {"task_type": "CAUSAL_LM"}))
    return path


@pytest.fixture(scope="session")
def spec_of(model_dir: Path) -> Callable[..., EngineSpec]:
    def make(**fields: Any) -> EngineSpec:
        args = {"enforce_eager": True} | fields.pop("args", {})
        given = {"model": str(model_dir), "block_size": BLOCK, "kv_blocks": 64, "context_length": 512}
        return EngineSpec(
            **given | {"dtype": "float32", "device": f"cpu:{own_cores()[0]}", "args": args} | fields
        )

    return make


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[..., Running]]:
    """Starts engines, one at a time unless `beside` keeps the others; at the end nothing of them may be left."""
    open_: list[tuple[Engine, asyncio.Runner]] = []

    def close() -> None:
        while open_:
            engine, runner = open_.pop()
            runner.run(engine.close())
            runner.close()
        _, left = psutil.wait_procs(vllm_processes(), timeout=20)  # killed ones take a moment
        assert not left

    def start(spec: EngineSpec, *, beside: bool = False) -> Running:
        if not beside:
            close()
        engine, runner = create_engine("vllm", spec), asyncio.Runner()
        open_.append((engine, runner))
        running = Running(engine, runner)
        running.info = running.do(engine.start())
        return running

    yield start
    close()


@pytest.fixture(scope="module")
def running(started: Callable[..., Running], spec_of: Callable[..., EngineSpec]) -> Running:
    return started(spec_of())


def vllm_processes() -> list[psutil.Process]:
    """List this process's descendants that belong to vLLM."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and not _is_other(" ".join(process.cmdline()))
    ]


def _is_other(command: str) -> bool:
    return "resource_tracker" in command or "moto.server" in command
