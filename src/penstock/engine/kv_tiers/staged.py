"""The tiers of one device process whose blocks pass through slots in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.core.types.kv import BLOCK_FIRST, KvLayout, RankLayout
from penstock.engine.kv_tiers.config import KvConfig
from penstock.engine.kv_tiers.maker import tier_maker
from penstock.engine.kv_tiers.size import TierSize
from penstock.engine.runner import RunnerInfo
from penstock.kv.connector.staging import Staging
from penstock.kv.host_arena import HostPart
from penstock.seams.kv import KvTier


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """One of a worker's device processes, and the blocks that it has.

    Attributes:
        worker: name of the worker, which its file on a disk ends with.
        model_digest: of all weights; for a tier that outlives the worker.
        num_blocks: of its device.
        block_bytes: of one.
        block_size: tokens in a block.
        content: what has to be equal before KV of one hash may be used: number format, layout, and which part of the heads and
            layers it has.
        number: of this process, below `processes`.
        processes: of the worker; each has an equal share of every tier.
        model_stamp: of the weights on this machine, as in `tier_maker`.
        host_part: the worker's part of its host's arena; used by a worker of one process.
        hash_key: the deployment's, as in `tier_maker`.
    """

    worker: str
    model_digest: str
    num_blocks: int
    block_bytes: int
    block_size: int
    content: str
    number: int = 0
    processes: int = 1
    model_stamp: str = ""
    host_part: HostPart | None = None
    hash_key: bytes = b""


def staged_tiers(kv: KvConfig, process: DeviceProcess, staging: Staging) -> Sequence[KvTier]:
    """Make the tiers of a device process.

    Raises:
        ConfigError: a tier cannot be made.
    """
    name = process.worker
    if process.processes > 1:
        name += f".{process.number}-of-{process.processes}"
    part = process.host_part if process.processes == 1 else None  # an extent is one process's
    maker = tier_maker(
        _share(kv, process),
        worker=name,
        model_digest=lambda: process.model_digest,
        hash_key=process.hash_key,
        model_stamp=lambda: process.model_stamp,
        host_part=None if part is None else replace(part, sharing=1),  # `kv` is the worker's share already
    )
    assert maker is not None, "made for tiers alone"
    rank = RankLayout(
        layers=(),
        heads=(),
        num_blocks=staging.num_slots,
        strides_bytes=(process.block_bytes,),
        order=BLOCK_FIRST,
    )
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=process.block_bytes // process.block_size, dtype=process.content,
        element_bytes=1, block_size=process.block_size, planes=1, ranks=(rank,),
    )  # fmt: skip
    info = RunnerInfo(
        num_blocks=process.num_blocks,
        block_size=process.block_size,
        context_length=process.block_size * process.num_blocks,
        vocab_size=0,
        kv_bytes_per_block=process.block_bytes,
        kv_layout=layout,
    )
    return maker(info, [[staging.memory]])


def _share(kv: KvConfig, process: DeviceProcess) -> KvConfig:
    """Give a process its share of bytes; a multiple is of its own device's blocks, and an object store is everybody's."""

    def share(size: TierSize) -> TierSize:
        if not size or size.is_multiple:
            return size
        blocks = size.blocks(process.num_blocks * process.processes, process.block_bytes)
        return TierSize(float(max(blocks // process.processes, 1) * process.block_bytes), "B")

    store = kv.object.size
    if store.is_multiple:
        store = TierSize(store.number * process.processes, store.unit)
    return kv.model_copy(
        update={
            "host": share(kv.host),
            "disk": kv.disk.model_copy(update={"size": share(kv.disk.size)}),
            "object": kv.object.model_copy(update={"size": store}),
        }
    )
