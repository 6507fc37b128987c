"""The pool of workers, over processes by script and virtual time."""

import asyncio
from functools import partial

import pytest

from penstock.core.errors import ConfigError, RequestError, Unavailable
from penstock.core.types.instances import ReplicaState, Role
from penstock.deploy.messages import Failed, Ready, StartPhase, WorkerRoleChanged
from penstock.deploy.supervisor.scale_file import ScaleFile
from tests.support.scripted_pool import PoolScene, ScriptedProcess

AGGREGATED = {"aggregated": {"engine": "mock"}}
PAIR = {"prefill": {"engine": "mock"}, "decode": {"engine": "mock", "replicas": 2}}
GPUS = {"aggregated": {"engine": "vllm", "hardware": "h100", "tensor_parallel": 2}}


def states(scale):
    return {replica.name: replica.state for replica in scale.replicas}


def declared(roles):
    return {Role(role): spec.get("replicas", 1) for role, spec in roles.items()}


@pytest.mark.virtual
async def test_a_start_is_seen_as_it_proceeds():
    scene = PoolScene(AGGREGATED)
    async with scene.running() as pool:
        scene.next = partial(ScriptedProcess, is_slow=True)
        (name,) = await pool.add(Role.AGGREGATED, by="test")
        await asyncio.sleep(1)
        scene.processes[name].say(StartPhase(what="loads the engine"))
        await asyncio.sleep(1)
        replica = (await pool.scale()).replicas[1]
        assert (replica.state, replica.phase) == (ReplicaState.STARTING, "loads the engine")
        assert replica.age_s == pytest.approx(2.0)
        scene.processes[name].say(Ready())
        await asyncio.sleep(1)
        scale = await pool.scale()
        assert states(scale)[name] is ReplicaState.READY
        assert scale.limits[0].start_s == pytest.approx(2.0)


NOT_THERE = Failed(message="no connection", outside=True)
WRONG = Failed(message="serves 'other'", outside=True, config=True)


def failing(scene, **failures):
    """Have the workers named so fail with these reports at every start."""

    def process(name):
        made = ScriptedProcess(is_slow=name in failures)
        if name in failures:
            made.say(failures[name])
            made.end(1)
        return made

    scene.make = process
    return scene


@pytest.mark.virtual
async def test_a_deployment_waits_for_a_server_of_each_role():
    scene = failing(PoolScene(PAIR), **{"prefill-1": NOT_THERE})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60), scene.running():
            pass
    scene = failing(PoolScene(PAIR), **{"decode-1": NOT_THERE})
    async with asyncio.timeout(60), scene.running():
        pass


@pytest.mark.virtual
async def test_a_role_whose_servers_are_all_wrong_ends_the_start():
    scene = failing(PoolScene(PAIR), **{"decode-1": WRONG, "decode-2": WRONG})
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(60), scene.running():
            pass
    assert caught.group_contains(ConfigError, match="serves 'other'")


@pytest.mark.virtual
async def test_a_worker_that_does_not_drain_is_killed():
    scene = PoolScene(AGGREGATED)
    async with scene.running() as pool:
        scene.next = partial(ScriptedProcess, ignores=True)
        (name,) = await pool.add(Role.AGGREGATED, by="test")
        await asyncio.sleep(1)
        await pool.retire([name], by="test")
        await asyncio.sleep(29)
        assert states(await pool.scale())[name] is ReplicaState.DRAINING
        await asyncio.sleep(2)
        assert list(states(await pool.scale())) == ["worker-1"]


@pytest.mark.virtual
async def test_a_flip_that_the_worker_refuses_changes_nothing():
    scene = PoolScene(PAIR)
    async with scene.running() as pool:
        refusal = RequestError("role prefill: transfers no KV", http_status=409)
        scene.processes["decode-2"].refusal = WorkerRoleChanged(role=Role.DECODE, problem=refusal.to_info())
        with pytest.raises(RequestError, match="transfers no KV"):
            await pool.flip("decode-2", Role.PREFILL, by="test")
        assert states(await pool.scale())["decode-2"] is ReplicaState.READY
        assert len((await pool.scale()).of(Role.DECODE)) == 2


@pytest.mark.virtual
async def test_a_flip_ends_with_its_process():
    scene = PoolScene(PAIR)
    async with scene.running() as pool:
        scene.processes["decode-2"].tell = lambda _news: scene.processes["decode-2"].end(-9)
        with pytest.raises(Unavailable, match="decode-2 ended while it became prefill"):
            await pool.flip("decode-2", Role.PREFILL, by="test")
        await asyncio.sleep(1)
        assert scene.jobs[-1].role is Role.DECODE


@pytest.mark.virtual
async def test_a_change_of_role_that_somebody_else_asks_for_is_known():
    scene = PoolScene(PAIR)
    async with scene.running() as pool:
        before = (await pool.scale()).revision
        scene.processes["decode-2"].say(WorkerRoleChanged(role=Role.PREFILL))
        await asyncio.sleep(1)
        scale = await pool.scale()
        assert (scale.revision, scale.changed_by) == (before + 1, "penstock role")
        assert len(scale.of(Role.PREFILL)) == 2


@pytest.mark.virtual
async def test_the_last_ready_worker_stays_while_another_starts():
    scene = PoolScene(AGGREGATED)
    async with scene.running() as pool:
        scene.next = partial(ScriptedProcess, is_slow=True)
        await pool.add(Role.AGGREGATED, by="test")
        with pytest.raises(
            RequestError, match=r"worker-1 is the last .* wait until one of worker-2 is ready"
        ):
            await pool.retire(["worker-1"], by="test")


@pytest.mark.virtual
async def test_the_last_prefill_worker_stays_where_decode_workers_compute_no_prompts():
    scene = PoolScene(PAIR | {"prefill": {"engine": "mock", "replicas": 2}})
    scene.next = partial(ScriptedProcess, needs_prefill=True)
    async with scene.running() as pool:
        await pool.retire(["prefill-1"], by="test")
        for change in (
            pool.retire(["prefill-2"], by="test"),
            pool.flip("prefill-2", Role.DECODE, by="test"),
        ):
            with pytest.raises(RequestError, match="prefill-2 is the last prefill worker that is ready"):
                await change


@pytest.mark.virtual
async def test_the_last_worker_of_an_adapter_stays():
    roles = {
        "aggregated": {"engine": "mock", "replicas": 2, "adapters": ["a", "b"], "adapters_per_worker": 1}
    }
    async with PoolScene(roles).running() as pool:
        with pytest.raises(RequestError, match="no other worker has adapter 'b'"):
            await pool.retire(["worker-2"], by="test")
        await pool.add(Role.AGGREGATED, 2, by="test")
        await asyncio.sleep(1)
        await pool.retire(["worker-2"], by="test")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"replicas_max": 1}, "replicas_max is 1; raise it"),
        ({"kv": {"host": "1GiB"}}, "kv.host is shared by the 1 workers"),
        ({"engine": "openai", "engine_args": {"url": ["http://h:1"]}}, "one worker for each url, 1"),
        ({"engine": "paged", "replicas": 512}, "512 workers compute on"),
    ],
)
@pytest.mark.virtual
async def test_why_no_more_may_be_added(fields, why):
    async with PoolScene({"aggregated": {"engine": "mock"} | fields}).running() as pool:
        assert (await pool.scale()).limits[0].room == 0
        with pytest.raises(RequestError, match=why):
            await pool.add(Role.AGGREGATED, by="test")


@pytest.mark.virtual
async def test_a_restarted_deployment_has_the_workers_it_was_scaled_to(tmp_path):
    with ScaleFile(tmp_path, declared(PAIR)) as file:
        async with PoolScene(PAIR, file=file).running() as pool:
            await pool.add(Role.PREFILL, 2, by="test")
            await pool.flip("decode-2", Role.PREFILL, by="test")
            await asyncio.sleep(1)
            await pool.retire(["prefill-1"], by="test")
    with ScaleFile(tmp_path, declared(PAIR)) as file:
        scene = PoolScene(PAIR, file=file)
        async with scene.running() as pool:
            scale = await pool.scale()
            roles = {replica.name: replica.role for replica in scale.replicas}
            prefill = dict.fromkeys(("decode-2", "prefill-2", "prefill-3"), Role.PREFILL)
            assert roles == {"decode-1": Role.DECODE, **prefill}
            assert scale.revision == 3
            assert scene.restored.startswith("3 prefill, 1 decode: set by test before the restart")


@pytest.mark.parametrize(
    ("first", "then", "devices", "count"),
    [(AGGREGATED, {"aggregated": {"engine": "mock", "replicas": 3}}, None, 3), (GPUS, GPUS, 2, 1)],
    ids=["the graph counts more", "no devices for it"],
)
@pytest.mark.virtual
async def test_a_kept_scale_that_does_not_fit_is_left(tmp_path, first, then, devices, count):
    with ScaleFile(tmp_path, declared(first)) as file:
        async with PoolScene(first, file=file).running() as pool:
            await pool.add(Role.AGGREGATED, by="test")
    with ScaleFile(tmp_path, declared(then)) as file:
        async with PoolScene(then, devices=devices, file=file).running() as pool:
            assert len((await pool.scale()).replicas) == count


@pytest.mark.virtual
async def test_nothing_changes_before_it_is_open_and_once_it_closes():
    scene = PoolScene(AGGREGATED)
    async with scene.running() as pool:
        await pool.drain()
        with pytest.raises(Unavailable, match="about to start or to stop"):
            await pool.add(Role.AGGREGATED, by="test")
