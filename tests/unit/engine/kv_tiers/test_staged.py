"""Tiers of a device process whose blocks pass through slots: sizes are of its device, and not of the slots."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.kv_tiers import KvConfig
from penstock.engine.kv_tiers.staged import DeviceProcess, staged_tiers
from penstock.kv.connector.staging import Staging
from penstock.seams.kv import KvTier

BLOCK_BYTES = 4096


def made(kv: dict[str, Any], *, processes: int = 1, staging_bytes: int = 16 * BLOCK_BYTES) -> Sequence[int]:
    """Make tiers of a device with 1,000 blocks; give how many blocks each can keep."""

    async def make() -> Sequence[int]:
        process = DeviceProcess(
            worker="w", model_digest="m", num_blocks=1000, block_bytes=BLOCK_BYTES, block_size=4, content="c",
            processes=processes,
        )  # fmt: skip
        staging = Staging(BLOCK_BYTES, staging_bytes)
        tiers: Sequence[KvTier] = staged_tiers(KvConfig.model_validate(kv), process, staging)
        sizes = [tier.num_blocks for tier in tiers]
        for tier in tiers:
            await tier.close()
        staging.close()
        return sizes

    return asyncio.run(make())


@pytest.mark.parametrize("processes", [1, 2])
def test_bytes_are_divided_among_the_processes_and_multiples_are_of_each_device(
    tmp_path: Path, processes: int
) -> None:
    kv = {"host": "1x", "disk": f"{tmp_path}/kv:16MiB", "object": f"file://{tmp_path}:2x"}
    assert made(kv, processes=processes) == [1000, 4096 // processes, 2000 * processes]


def test_a_tier_may_have_more_than_10_000_times_the_slots(tmp_path: Path) -> None:
    kv = {"object": f"file://{tmp_path}:1GiB"}
    assert made(kv) == [(1 << 30) // BLOCK_BYTES]
