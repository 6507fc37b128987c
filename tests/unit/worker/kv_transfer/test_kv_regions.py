"""What a worker refuses at its start, and of handles, where KV memory and layouts do not fit."""

import msgspec
import numpy as np
import pytest

from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.core.types.instances import EngineInfo
from penstock.core.types.kv import KvAccess, KvLayout
from penstock.core.wire import encode
from penstock.testing.loop import run_async
from penstock.transfer import TransferAgent, TransferConfig
from penstock.worker.kv_transfer.reader import KvRegions

LAYOUT = KvLayout(
    num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16", element_bytes=2, block_size=4
).split(num_blocks=3, tp=2)
RANK_BYTES = 3 * 2 * 2 * 4 * 4 * 2


def info(layout=LAYOUT, block_size=4):
    return EngineInfo(
        block_size=block_size,
        total_blocks=3,
        context_length=12,
        max_batch_tokens=8,
        max_running_requests=2,
        kv_layout=layout,
    )


def memory(*sizes):
    return [[np.zeros(size, np.uint8)] for size in sizes]


def source(layout=LAYOUT, regions=((1,), (2,))):
    encoded = b"" if layout is None else encode(layout)
    return KvAccess(agent=b"", layout=encoded, regions=regions)


def registered(check, *, engine=None, of=None, transports=None):
    async def main():
        async with TransferAgent("a", TransferConfig(listen=("memory",), transports=transports)) as agent:
            regions = KvRegions(engine or info())
            regions.register(memory(RANK_BYTES, RANK_BYTES) if of is None else of, agent)
            return check(regions)

    return run_async(main())


@pytest.mark.parametrize(
    ("engine", "of", "text"),
    [
        (info(None), memory(64), "0 ranks, the engine gives memory of 1"),
        (info(), (), "2 ranks, the engine gives memory of 0"),
        (info(), memory(RANK_BYTES, RANK_BYTES - 1), "rank 1 has regions of .*, its layout needs"),
        (info(), [[*memory(RANK_BYTES)[0]] * 2, *memory(RANK_BYTES)], "rank 0 has regions of"),
        (info(block_size=8), memory(RANK_BYTES, RANK_BYTES), "blocks of 4 tokens, the engine says 8"),
        (info(msgspec.structs.replace(LAYOUT, num_kv_heads=1)), memory(1, 1), "rank 1: heads: 1; each"),
    ],
)
def test_memory_that_is_not_what_the_layout_says_is_refused_at_the_start(engine, of, text):
    with pytest.raises(ConfigError, match=f"kv_layout: .*{text}"):
        registered(lambda _: None, engine=engine, of=of)


def test_memory_that_no_transport_reaches_is_refused_at_the_start():
    with pytest.raises(
        ConfigError, match=r"worker\.kv_transfer\.transfer\.transports: those that work here \(none\)"
    ):
        registered(lambda _: None, transports=("file",))


def test_a_source_that_does_not_fit_is_refused_with_the_reason():
    def check(regions):
        assert regions.ids != ()
        assert set(regions.transports) >= {"memory", "shm", "tcp"}
        other = msgspec.structs.replace
        for wrong, text in (
            (source(None, ()), "keeps no memory for KV"),
            (source(other(LAYOUT, dtype="bfloat16")), "dtype is 'bfloat16' at the source"),
            (source(other(LAYOUT, head_dim=8)), "head_dim is 8 at the source"),
            (source(other(LAYOUT, block_size=8)), "block_size is 8 at the source"),
            (source(other(LAYOUT, ranks=LAYOUT.ranks[:1])), "which no rank of the source has"),
            (source(regions=((1,), ())), "rank 1: 0 regions, its layout has 1"),
        ):
            with pytest.raises(TransferRefused, match=text):
                regions.ranges(wrong, [0], [1])
        with pytest.raises(TransferRefused, match="block 3, of 3"):
            regions.ranges(source(), [3], [1])
        for wrong, text in (
            (source(regions=((1,),)), "regions of 1 ranks"),
            (msgspec.structs.replace(source(), layout=b"\xc1"), "cannot be read"),
        ):
            with pytest.raises(TransferError, match=text):
                regions.ranges(wrong, [0], [1])

    registered(check)


def test_without_memory_on_both_sides_nothing_moves():
    assert (
        registered(lambda regions: regions.ranges(source(None, ()), [0], [1]), engine=info(None), of=())
        is None
    )
