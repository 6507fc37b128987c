"""The runs of `python -m benchmarks engine` in this process: the paged engine, and transformers' own loop."""

import argparse
import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from penstock.core.errors import EngineError
from penstock.core.ids import RequestId
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import num_tokens, pack_tokens
from penstock.engine.batched import BatchedEngine
from penstock.engine.paged.memory import PagedConfig
from penstock.engine.paged.runner import paged_engine

_REQUESTS = {1: 8, 8: 32, 32: 128}
"""By concurrency: a few seconds each, long enough for the batch to be full most of the time."""
_BLOCKS = 1024
_IDLE_BLOCKS = 4096
_DECODE_ROWS = 8

Samples = dict[str, list[float]]


async def measure(model_dir: Path, options: argparse.Namespace) -> tuple[Samples, dict[str, float]]:
    """Run everything `options.rounds` times; quick is once, with as few requests as make a batch.

    Returns:
        Samples by figure, and the limits.
    """
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    workload = _RandomPrompts(options, model.config.vocab_size)
    requests = {
        concurrency: concurrency if options.quick else count for concurrency, count in _REQUESTS.items()
    }
    samples: Samples = {}
    async with (
        _engine(model_dir, options, _BLOCKS) as engine,
        _engine(model_dir, options, _BLOCKS + _IDLE_BLOCKS) as full,
    ):
        _fill(full, await full.start())
        _generate_tokens_per_s(model, workload, 1)
        await _tokens_per_s(engine, workload, 8, 8)
        for _ in range(1 if options.quick else options.rounds):
            measured = {"generate_tokens_per_s": _generate_tokens_per_s(model, workload, requests[1])}
            for concurrency, count in requests.items():
                speed = await _tokens_per_s(engine, workload, concurrency, count)
                measured[f"engine_tokens_per_s_c{concurrency}"] = speed
            measured["decode_step_ms_free_blocks"] = await _decode_step_ms(engine, workload)
            measured["decode_step_ms_idle_blocks"] = await _decode_step_ms(full, workload)
            for name, value in measured.items():
                samples.setdefault(name, []).append(value)
    return samples, {"matrix_products_tokens_per_s_c32": _products_tokens_per_s(model, 32)}


class _RandomPrompts:
    """Prompts of random tokens; each is asked with a salt of its own, so that no prefix is found in the cache."""

    def __init__(self, options: argparse.Namespace, vocab_size: int) -> None:
        self._random = np.random.default_rng(options.seed)
        self._vocab_size = vocab_size
        self._input_tokens: int = options.input_tokens
        self._salts = itertools.count()
        self.output_tokens: int = options.output_tokens

    def prompt(self) -> list[int]:
        half = self._input_tokens // 2
        length = self._random.integers(self._input_tokens - half, self._input_tokens + half + 1)
        token_ids: list[int] = self._random.integers(1, self._vocab_size, length).tolist()
        return token_ids

    def request(self) -> Request:
        salt = next(self._salts)
        return Request(
            request_id=RequestId(f"bench-{salt}"),
            model="bench",
            token_ids=pack_tokens(self.prompt()),
            sampling=SamplingParams(max_tokens=self.output_tokens, temperature=0.0, ignore_eos=True),
            salt=salt.to_bytes(8, "little"),
        )


@asynccontextmanager
async def _engine(
    model_dir: Path, options: argparse.Namespace, kv_blocks: int
) -> AsyncIterator[BatchedEngine]:
    engine = paged_engine(PagedConfig(model=str(model_dir), kv_blocks=kv_blocks, threads=options.threads))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


def _fill(engine: BatchedEngine, info: EngineInfo) -> None:
    """Occupy every block with cached content that no request asks for."""
    hashes = np.random.default_rng(1).integers(0, 2**64, (info.total_blocks, 2), dtype=np.uint64)
    block_ids = engine.reserve(info.total_blocks)
    assert block_ids is not None, "nothing runs yet"
    engine.publish(block_ids, hashes, None)
    engine.unpin(block_ids)


@asynccontextmanager
async def _steps(engine: BatchedEngine) -> AsyncIterator[AsyncIterator[Step]]:
    steps = engine.steps()
    try:
        yield steps
    finally:
        await cast("AsyncGenerator[Step]", steps).aclose()


async def _tokens_per_s(
    engine: BatchedEngine, workload: _RandomPrompts, concurrency: int, count: int
) -> float:
    requests = [workload.request() for _ in range(count)]
    for request in requests[:concurrency]:
        engine.submit(request)
    waiting = deque(requests[concurrency:])
    received, unfinished = 0, count
    gc.collect()
    begin = time.perf_counter()
    async with _steps(engine) as steps:
        while unfinished:
            step = await anext(steps)
            for delta in step.deltas:
                received += num_tokens(delta.token_ids)
                if delta.error is not None:
                    raise EngineError(delta.error.message)
                if delta.finish_reason is not None:
                    unfinished -= 1
                    if waiting:
                        engine.submit(waiting.popleft())
    return received / (time.perf_counter() - begin)


async def _decode_step_ms(engine: BatchedEngine, workload: _RandomPrompts) -> float:
    """Give the median time of steps that only decode."""
    for _ in range(_DECODE_ROWS):
        engine.submit(workload.request())
    unfinished = _DECODE_ROWS
    steps_ms, last = [], 0.0
    async with _steps(engine) as steps:
        while unfinished:
            step = await anext(steps)
            now = time.perf_counter()
            if len(step.deltas) == _DECODE_ROWS and all(delta.cached_tokens is None for delta in step.deltas):
                steps_ms.append((now - last) * 1e3)
            last = now
            unfinished -= sum(delta.finish_reason is not None for delta in step.deltas)
    return statistics.median(steps_ms or [0.0])


def _generate_tokens_per_s(model: Any, workload: _RandomPrompts, count: int) -> float:
    """Time transformers' own loop: one prompt after another."""
    prompts = [torch.tensor([workload.prompt()]) for _ in range(count)]
    begin = time.perf_counter()
    for prompt in prompts:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=workload.output_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return count * workload.output_tokens / (time.perf_counter() - begin)


def _products_tokens_per_s(model: Any, rows: int) -> float:
    """Bound decoding from above: nothing but the model's matrix products, for a batch of `rows`."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = {layer.in_features: torch.randn(rows, layer.in_features) for layer in layers}
    seconds = []
    with torch.inference_mode():
        for _ in range(20):
            begin = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            seconds.append(time.perf_counter() - begin)
    return rows / statistics.median(seconds)
