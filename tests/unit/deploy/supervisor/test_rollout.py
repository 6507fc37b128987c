"""The order of a rollout's steps, over a pool with processes by script and virtual time."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import Role
from penstock.deploy.messages import Drain, Failed
from penstock.deploy.supervisor.rollout import Aim, Rollout
from penstock.graph import Graph
from tests.support.scripted_pool import PoolScene, ScriptedProcess

CPU = {"engine": "mock", "replicas": 2}
GPU = {"engine": "vllm", "hardware": "h100", "replicas": 4}
PAIR = {"prefill": {"engine": "mock", "replicas": 2}, "decode": {"engine": "mock", "replicas": 2}}


class Change:
    """A rollout on a scene; `said` has its steps, `counts` the (old, new) workers that did not drain at each."""

    def __init__(self, scene, pool, *, is_revision=False, counts=None, roles=None):
        self.scene, self.pool = scene, pool
        self.said, self.counts = [], []
        graph = roles or scene.roles
        specs = Graph.model_validate({"model": "m", "roles": graph}).roles.present()
        aims = {
            role: Aim(spec, (counts or {}).get(role, spec.replicas), "new") for role, spec in specs.items()
        }
        pool.define(
            specs
            | {worker.home: scene.specs[worker.home] for worker in pool.workers if worker.home not in specs}
        )
        scene.template = "new"
        self.rollout = Rollout(
            pool, aims, is_revision=is_revision, drain_s=600.0, starts_max=3, say=self._note
        )

    def _note(self, line):
        self.said.append(line)
        living = [worker.template for worker in self.pool.workers if not worker.is_draining]
        self.counts.append((living.count("old"), living.count("new")))

    def templates(self):
        return sorted((worker.name, worker.template) for worker in self.pool.workers)


def scene_of(roles, devices=None):
    scene = PoolScene(roles, devices=devices)
    scene.roles = roles
    scene.specs = Graph.model_validate({"model": "m", "roles": roles}).roles.present()
    return scene


@asynccontextmanager
async def changing(before, *, devices=None, **options):
    """Begin a rollout on a pool with workers of the roles before, and check the pool after the block."""
    scene = scene_of(before, devices)
    async with scene.running() as pool:
        yield Change(scene, pool, **options)
        pool.check()


@pytest.mark.virtual
async def test_a_new_worker_is_ready_before_an_old_one_drains():
    async with changing({"aggregated": CPU}) as done:
        await done.rollout.run()
        assert done.said == [
            "aggregated: worker-3 starts",
            "aggregated: worker-3 ready",
            "worker-2 drains",
            "aggregated: worker-2 starts",
            "aggregated: worker-2 ready",
            "worker-1 drains",
        ]
        assert min(sum(each) for each in done.counts) == 2
        assert done.templates() == [("worker-2", "new"), ("worker-3", "new")]


@pytest.mark.virtual
async def test_without_room_an_old_worker_goes_first_and_never_two():
    async with changing({"aggregated": GPU}, devices=4) as done:
        done.rollout.check()
        await done.rollout.run()
        assert [sum(each) for each in done.counts] == [3, 4, 4] * 4
        assert {template for _, template in done.templates()} == {"new"}
        assert len(done.templates()) == 4


@pytest.mark.parametrize(
    ("role", "devices", "is_revision", "order"),
    [
        (CPU, None, False, "one after another"),
        (CPU, None, True, "beside the old ones, then switch"),
        (GPU, 8, False, "one after another"),
        (GPU, 8, True, "beside the old ones, then switch"),
        (GPU, 4, False, "one after another, each old one draining first, as there is no room beside it"),
        (GPU, 4, True, "where half of the old ones make room first, one by one, then switch"),
        (GPU, 6, True, "where half of the old ones make room first, one by one, then switch"),
        (CPU | {"engine": "paged", "kv": {"disk": "/d:1GiB"}}, None, False, "one after another, each old one draining first, as there is no room beside it"),
    ],
)  # fmt: skip
@pytest.mark.virtual
async def test_the_order_is_told_by_the_room_that_there_is(role, devices, is_revision, order):
    async with changing({"aggregated": role}, devices=devices, is_revision=is_revision) as done:
        assert done.rollout.order(list(Role)) == order
        assert done.rollout.order([Role.PREFILL]) in {"one after another", "beside the old ones, then switch"}


@pytest.mark.virtual
async def test_workers_of_another_revision_start_beside_the_old_ones_which_then_drain_for_long_all_at_once():
    async with changing(PAIR, is_revision=True) as done:
        old = {worker.name: done.scene.processes[worker.name] for worker in done.pool.workers}
        await done.rollout.run()
        assert done.counts == [(4, 2), (4, 2), (4, 4), (4, 4), (4, 4), (0, 4)]
        assert done.said[4].startswith("the new revision takes requests")
        assert all(process.told == [Drain(timeout_s=600.0)] for process in old.values())
        assert {template for _, template in done.templates()} == {"new"}


@pytest.mark.virtual
async def test_without_room_half_of_a_revision_makes_room_for_the_next():
    async with changing({"aggregated": GPU}, devices=4, is_revision=True) as done:
        await done.rollout.run()
        before = [each for each in done.counts if each[0]]
        assert min(old for old, _ in before) == 2, "half of them serve until the other half is there"
        assert {template for _, template in done.templates()} == {"new"}
        assert len(done.templates()) == 4


@pytest.mark.virtual
async def test_the_only_worker_of_a_full_machine_is_refused_before_anything_happens():
    async with changing({"aggregated": GPU | {"replicas": 1}}, devices=1) as done:
        with pytest.raises(RequestError, match=r"worker-1 is its only worker, and a new one finds no room"):
            done.rollout.check()
        assert done.templates() == [("worker-1", "old")]


@pytest.mark.parametrize("kv", [{"host": "1GiB"}, {"disk": "/var/cache/kv:1GiB"}], ids=["host", "disk"])
@pytest.mark.virtual
async def test_a_worker_with_memory_or_files_of_its_own_ends_before_its_successor_begins(kv):
    async with changing(
        {"aggregated": {"engine": "paged", "replicas": 2, "kv": kv, "replicas_max": 4}}
    ) as done:
        await done.rollout.run()
        assert max(sum(each) for each in done.counts) == 2
        assert done.templates() == [("worker-1", "new"), ("worker-2", "new")]


@pytest.mark.virtual
async def test_workers_of_a_role_that_is_gone_drain_once_those_of_a_new_one_are_ready():
    async with changing({"aggregated": CPU}, roles=PAIR) as done:
        await done.rollout.run()
        assert done.said[-1] == "worker-1, worker-2 drain"
        assert {worker.home for worker in done.pool.workers} == {Role.PREFILL, Role.DECODE}
        done.pool.define(scene_of(PAIR).specs)


class Failing(ScriptedProcess):
    """Reports an error as soon as it is started."""

    def __init__(self, *, config):
        super().__init__(is_slow=True)
        self.say(Failed(message="no such argument", config=config))
        self.end(2)


@pytest.mark.parametrize("config", [True, False], ids=["wrong setting", "three times"])
@pytest.mark.parametrize("is_revision", [False, True], ids=["one by one", "revision"])
@pytest.mark.parametrize("devices", [3, 2], ids=["with room", "full"])
@pytest.mark.virtual
async def test_a_worker_that_does_not_come_up_leaves_as_many_old_ones_as_before(config, is_revision, devices):
    roles = {"aggregated": GPU | {"replicas": 2}}
    async with changing(roles, devices=devices, is_revision=is_revision) as done:
        done.scene.next = partial(Failing, config=config)
        with pytest.raises(Unavailable, match=r"worker-\d does not come up.*: no such argument"):
            await done.rollout.run()
        done.scene.next, done.scene.template = ScriptedProcess, "old"
        await done.rollout.restore(done.scene.specs)
        await asyncio.sleep(1.0)
        assert [template for _, template in done.templates()] == ["old", "old"]
        assert all(worker.running.ready.is_set() for worker in done.pool.workers)
