"""A disk that hangs while waiting requests load their prefixes from it: nobody waits longer than for a late load."""

import asyncio
import random
from time import perf_counter

from penstock.core.types.events import Tier
from penstock.engine.mock.engine import MockConfig, StepTiming, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.disk.slot_file import SlotFile
from penstock.kv.namespace import Namespace
from penstock.kv.stored_tier import StoredTier
from penstock.testing.engines.probe import EngineProbe, make_request
from penstock.testing.loop import run_async
from tests.support.sick_disk import SickDisk

SIZE, BLOCKS, SLOTS, LENGTH = 4, 48, 400, 48
BLOCK_BYTES = 8 * SIZE
NAMESPACE = Namespace(model_digest="m", dtype="digests", layout="l", block_size=SIZE)
PROMPTS = [[1 + (n * 97 + at * 13) % 499 for at in range(LENGTH)] for n in range(10)]
"""12 blocks each; the device has room for four of them."""
PREFILL_S = 2e-3
"""To compute a token: 0.1 s for a prompt, which takes longer than to load it."""
HANGS_S = 600.0


def test_requests_whose_prefetch_hangs_are_computed_in_their_turn(tmp_path):
    disk = SickDisk(random.Random(0), BLOCK_BYTES, hangs_s=HANGS_S)

    def tiers(info, memory):
        device = DeviceBlocks.of(memory, info.kv_layout)
        slots = SlotFile(tmp_path / "kv", SLOTS * 4096, BLOCK_BYTES, NAMESPACE, disk=disk, threads=2)
        return [StoredTier(slots, Tier.DISK, device, SLOTS)]

    shape = RunnerInfo(
        num_blocks=BLOCKS, block_size=SIZE, context_length=80, vocab_size=500, kv_bytes_per_block=BLOCK_BYTES
    )
    engine = mock_engine(
        shape,
        MockConfig(timing=StepTiming(prefill_s_per_token=PREFILL_S)),
        SchedulerConfig(max_running_requests=1),
        make_tiers=tiers,
    )

    async def told(probe, turn):
        """Ask all at once: one runs, the others wait and load."""
        answers = await probe.run(
            *(make_request(f"{turn}.{n}", prompt, max_tokens=4) for n, prompt in enumerate(PROMPTS))
        )
        return [answer.token_ids for answer in answers]

    async def main():
        async with EngineProbe(engine) as probe:
            first = await told(probe, "first")
            while probe.engine.kv.holders():  # noqa: ASYNC110 - until all is written
                await asyncio.sleep(0.001)
            before = None
            while before is None or not before.loaded_blocks:  # speeds are known
                await told(probe, f"quick{perf_counter()}")
                (before,) = probe.engine.kv.counts
            disk.be("hangs")
            again = await told(probe, "hung")  # while it hangs
            (hung,) = probe.engine.kv.counts
            assert again == first
            assert disk.hung > 0
            assert hung.prefetched_blocks > before.prefetched_blocks, "loads for requests that wait"
            assert hung.late_loads > before.late_loads
            assert hung.is_off, "after three late loads it is asked no more"
            assert probe.engine.load().active_blocks == 0, "targets of late loads are free again"
            probe.engine.scheduler.check()
            disk.be("well")
            last = None
            while last is None or last.is_off or last.loaded_blocks == hung.loaded_blocks:
                assert await told(probe, f"well{perf_counter()}") == first
                (last,) = probe.engine.kv.counts
            assert (last.corrupt_blocks, probe.engine.load().failed_steps) == (0, 0)
            probe.engine.scheduler.check()

    try:
        run_async(main(), timeout_s=240)
    finally:
        disk.be("well")
