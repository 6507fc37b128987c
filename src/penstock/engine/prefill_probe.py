"""A probe of a runner: how long it takes to compute a prompt token, before the first request."""

from time import perf_counter

import numpy as np

from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.runner import Runner, RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import SequenceLimits
from penstock.kv.pool import BlockPool

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
