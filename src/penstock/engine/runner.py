"""Runners: the part of an engine that computes one planned step.

All engines share scheduler, pool and step loop, so the same requests give the same KV events; only the runner differs.
A runner owns the model and the KV memory. It knows neither queues nor when requests end.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.kv import KvLayout
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import Sampled, SequenceLimits, SequenceTable, StepPlan
from penstock.kv.groups import ONE_TABLE, KvGroups, Windows
from penstock.kv.pool import BlockPool

_log = get_logger()


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """A runner's report once its model is loaded.

    Attributes:
        context_length: the model's own limit; the engine lowers it to what `num_blocks` can hold.
        kv_layout: None without KV memory.
        embedding_size: as in `EngineInfo`.
        structured_outputs: as in `EngineInfo`, and so is `sampling_fields`.
        windows: sliding windows with blocks of their own.
        groups: groups of layers with block tables of their own, the first one over the whole context; None for one table. A
            runner that keeps no KV has `windows` alone.
    """

    num_blocks: int
    block_size: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    kv_bytes_per_block: int = 0
    kv_layout: KvLayout | None = None
    windows: Windows = ONE_TABLE
    embedding_size: int = 0
    structured_outputs: bool = False
    groups: KvGroups | None = None
    sampling_fields: tuple[str, ...] = ()


def end_tokens_within(vocab_size: int, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Drop end-of-sequence ids outside the vocabulary, which some checkpoints name, with one warning."""
    known = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
    if len(known) < len(eos_token_ids):
        foreign = [token_id for token_id in eos_token_ids if token_id not in known]
        _log.warning("eos_token_ids_past_vocabulary", left_out=foreign, vocab_size=vocab_size)
    return known


class Runner(Protocol):
    """Computes steps for a `BatchedEngine`, one at a time."""

    async def start(self) -> RunnerInfo:
        """Load the model.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        ...

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        """Write the KV of the planned tokens into their blocks, and sample a token for rows with `plan.samples`.

        Nobody changes the table until this returns. An exception ends all requests of this plan with an error;
        `Sampled.errors` ends single ones.

        All KV writes of the step must have completed on the device when this returns or raises: afterwards the blocks are
        announced, read by other workers, and reused.
        """
        ...

    def kv_memory(self) -> Sequence[Sequence[object]]:
        """Return the memory of all blocks, as in `seams.KvBlocks`."""
        ...

    async def close(self) -> None:
        """Release everything. Safe after a failed `start`, and twice."""
        ...


class BlockingRunner(Protocol):
    """A runner with blocking methods, such as a model's forward pass; `ThreadedRunner` wraps it as a `Runner`.

    `start`, `run` and `close` are called on one worker thread, `kv_memory` on the event loop's thread after `start`.
    """

    def start(self) -> RunnerInfo: ...

    def run(self, plan: StepPlan, table: SequenceTable) -> Sampled: ...

    def kv_memory(self) -> Sequence[Sequence[object]]: ...

    def close(self) -> None: ...


class ThreadedRunner:
    """Runs a `BlockingRunner` on its own thread, so that the event loop stays responsive during a step."""

    def __init__(self, runner: BlockingRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-runner")
        self._closed = False

    async def start(self) -> RunnerInfo:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.start)

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.run, plan, table)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return self._runner.kv_memory()

    async def close(self) -> None:
        """Wait for the current step, then close the runner."""
        if self._closed:
            return
        self._closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._runner.close)
        finally:
            self._thread.shutdown(wait=False)


_TOKENS = 128
_WARM_UP_TOKENS = 16


async def probe_prefill(
    runner: Runner, info: RunnerInfo, limits: SequenceLimits, config: SchedulerConfig
) -> float | None:
    """Compute two short prompts in a pool that is then forgotten; returns seconds per token of the second.

    None if they do not fit, or fail: then the first requests tell more.
    """
    most = min(limits.context_length, info.num_blocks * info.block_size, config.max_batch_tokens) - 1
    if most <= _WARM_UP_TOKENS:
        return None
    scheduler = Scheduler(BlockPool(info.num_blocks, info.block_size), limits, config)
    seconds = 0.0
    for number, tokens in enumerate((_WARM_UP_TOKENS, min(_TOKENS, most))):
        scheduler.submit(
            Request(
                request_id=RequestId(f"probe-{number}"),
                model="",
                token_ids=pack_tokens(np.arange(number, number + tokens, dtype=np.int32) % limits.vocab_size),
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
            )
        )
        seconds = 0.0
        while (plan := scheduler.plan()) is not None:
            begun_s = perf_counter()
            try:
                sampled = await runner.run(plan, scheduler.table)
            except Exception as error:  # noqa: BLE001 - requests will say what is wrong
                get_logger().info("prefill_probe_failed", error=f"{type(error).__name__}: {error}")
                return None
            seconds += perf_counter() - begun_s
            scheduler.commit(plan, sampled)
    return seconds / min(_TOKENS, most)
