"""The arena that the supervisor keeps for the workers of its host."""

import os

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.resources import HostArena
from penstock.graph import RoleSpec
from penstock.kv.namespace import Namespace
from tests.support.shared_host import HostWorker
from tests.support.slots import chain

GIB = 1 << 30


def role(host, replicas=2):
    return RoleSpec.model_validate({"engine": "mock", "replicas": replicas, "kv": {"host": host}})


def test_each_worker_has_an_extent_of_its_own_with_room_for_its_share():
    roles = {Role.PREFILL: role("1GiB", 2), Role.DECODE: role("3GiB", 3)}
    with HostArena(roles) as arena:
        parts = [arena.part(name, n) for name, each in roles.items() for n in range(each.replicas)]
        assert [part.number for part in parts] == [0, 1, 2, 3, 4]
        assert [part.sharing for part in parts] == [2, 2, 3, 3, 3]
        (extents,) = {part.extents for part in parts}
        ends = [offset + size for offset, size in extents]
        assert [offset for offset, _ in extents] == [0, *ends[:-1]], "one after another"
        assert all(offset % 4096 == 0 for offset, _ in extents)
        assert [size >= GIB // 2 for _, size in extents[:2]] == [True, True]
        assert [size >= GIB for _, size in extents[2:]] == [True] * 3
        assert os.stat(parts[0].path).st_blocks == 0, "nobody has taken memory yet"  # noqa: PTH116


def test_a_multiple_of_blocks_has_room_for_all_memory_and_takes_none():
    with HostArena({Role.AGGREGATED: role("5x")}) as arena:
        part = arena.part(Role.AGGREGATED, 1)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert part.extents[1][1] >= memory
        assert os.stat(part.path).st_blocks == 0  # noqa: PTH116


def test_roles_without_a_host_tier_have_no_part():
    with HostArena({Role.PREFILL: role("0"), Role.DECODE: role("1MiB", 1)}) as arena:
        assert arena.part(Role.PREFILL, 0) is None
        assert arena.part(Role.DECODE, 0).number == 0
        assert arena.part(Role.DECODE, 1) is None
    with HostArena({Role.AGGREGATED: role("0")}) as arena:
        assert arena.part(Role.AGGREGATED, 0) is None


@pytest.mark.parametrize("block_bytes", [32, 256, 65_536])
async def test_a_workers_blocks_and_their_records_fit(block_bytes):
    """Also the smallest blocks, whose records are larger than they are."""
    with HostArena({Role.AGGREGATED: role("4MiB")}) as arena:
        workers = [
            HostWorker(arena.part(Role.AGGREGATED, n), (2 << 20) // block_bytes, block_bytes)
            for n in range(2)
        ]
        await workers[0].offload(chain(6))
        assert await workers[1].load(chain(6)) == 6
        for worker in workers:
            await worker.tier.close()


async def test_it_ends_with_the_deployment():
    with HostArena({Role.AGGREGATED: role("1MiB")}) as arena:
        part = arena.part(Role.AGGREGATED, 0)
        await HostWorker(part, 4, 4096).tier.close()
    with pytest.raises(ConfigError, match=r"kv\.host"):
        HostWorker(part, 4, 4096, Namespace(model_digest="", dtype="", layout="", block_size=4))
