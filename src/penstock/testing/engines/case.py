"""Base of the parts of the engine suite: limits, prompts, and a reference engine."""

import random
from typing import ClassVar

from penstock.core.types.requests import Request
from penstock.engine.mock.engine import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.testing.engines.probe import Answer, EngineProbe, EngineSetup, MovingEngine
from penstock.testing.loop import run_async

SETUP = EngineSetup()
FOREVER = 200
"""Tokens of an answer that outlasts its test."""


class EngineCase:
    """Makes engines and prompts. Set `vocab_size` and `eos_token_ids` to the model's."""

    vocab_size: ClassVar[int] = 256
    eos_token_ids: ClassVar[tuple[int, ...]] = ()

    def make_engine(self, setup: EngineSetup) -> MovingEngine:
        """Make an engine that is not started, within the given limits, hashing with `DEFAULT_KEY`."""
        raise NotImplementedError

    def probe(self, setup: EngineSetup = SETUP) -> EngineProbe:
        return EngineProbe(self.make_engine(setup))

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(self.vocab_size) for _ in range(length)]

    def answer(self, *requests: Request, setup: EngineSetup = SETUP) -> list[Answer]:
        """Run requests together on a new engine."""

        async def main() -> list[Answer]:
            async with self.probe(setup) as probe:
                return await probe.run(*requests)

        return run_async(main())


def reference_engine(
    setup: EngineSetup, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
) -> MovingEngine:
    """Make a mock engine that checks its block tables on every step and sleeps next to no time."""
    shape = RunnerInfo(
        num_blocks=setup.kv_blocks,
        block_size=setup.block_size,
        context_length=setup.context_length,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        kv_bytes_per_block=10 * setup.block_size,
    )
    scheduler = SchedulerConfig(
        max_batch_tokens=setup.max_batch_tokens,
        max_running_requests=setup.max_running_requests,
        max_waiting_requests=setup.max_waiting_requests,
    )
    return mock_engine(shape, MockConfig(speedup=1000), scheduler)
