"""Prefill and decode workers whose engines transfer KV by themselves."""

import pytest

from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster, memory_transport
from tests.support.kv_transfer import PRICES, tiny_engine, tiny_request, whole_answer
from tests.support.kv_transfer_scene import ALWAYS
from tests.support.native_engine import NativeEngine
from tests.support.scenes import run_by


def run(scene, *, decode=None, early=False):
    table = {}

    async def main():
        engines = {
            "p0": NativeEngine(table, early=early),
            "d0": NativeEngine(table) if decode is None else decode(table),
        }
        async with MemoryCluster() as cluster:
            for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
                await cluster.start(
                    name, engines[name], role=role, prices=PRICES, transport=memory_transport()
                )
            async with cluster.dispatcher(ALWAYS) as dispatcher:
                await dispatcher.looked()
                await scene(cluster, dispatcher, engines, table)
                dispatcher.check()

    run_virtual(main())


async def alone(request):
    async with MemoryCluster() as cluster:
        await cluster.start("a0", tiny_engine(), prices=PRICES)
        async with cluster.dispatcher(ALWAYS) as dispatcher:
            await dispatcher.looked()
            return await whole_answer(dispatcher, request)


@pytest.mark.parametrize("early", [False, True])
def test_the_decode_worker_gets_the_payload_and_samples_every_token(early):
    async def scene(_, dispatcher, engines, table):
        tokens, reason, *_ = await whole_answer(dispatcher, tiny_request("a"))
        assert reason is FinishReason.LENGTH
        assert tokens == (await alone(tiny_request("a")))[0]
        assert engines["d0"].loads == [b"a"]
        assert table == {b"a": 1}
        assert "a" in engines["p0"].aborted, "its KV is released once the decode worker has a token"

    run(scene, early=early)


@run_by(run, decode=lambda table: NativeEngine(table, kind="native-2"))
async def test_engines_of_other_kinds_are_not_paired(cluster, dispatcher, engines, table):
    tokens, *_ = await whole_answer(dispatcher, tiny_request("a"))
    assert len(tokens) == 20
    assert engines["d0"].loads == [], "the decode worker answers alone"


@run_by(run)
async def test_roles_may_change(cluster, dispatcher, engines, table):
    await dispatcher.change_role("p0", Role.AGGREGATED)
    await whole_answer(dispatcher, tiny_request("a"))
    await dispatcher.change_role("p0", Role.PREFILL)
    await whole_answer(dispatcher, tiny_request("b"))
    assert engines["d0"].loads == [b"b"]
    assert cluster.worker("p0").instance.role is Role.PREFILL
