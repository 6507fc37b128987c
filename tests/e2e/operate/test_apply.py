"""`penstock apply` on real processes under streams: no request fails, no token is wrong, and what fails leaves what ran."""

import asyncio
import os
import shutil
import signal
from contextlib import asynccontextmanager

import psutil
import pytest
from safetensors.torch import load_file, save_file

from penstock.demo import MODEL_DIR
from tests.support.host import until
from tests.support.streams import Load
from tests.support.up import Up

pytestmark = pytest.mark.slow
PROMPTS = [f"{number} times the same question" for number in range(6)]
MOCK = {"engine": "mock"}


@pytest.fixture
def up(tmp_path, runtime_dir):
    made = Up(tmp_path, runtime_dir)
    yield made
    made.end()


@asynccontextmanager
async def streams(up, **options):
    """Have streams under way in the block; each must be whole."""
    async with Load(up.url, PROMPTS, **options) as load:
        await load.more(len(PROMPTS))
        yield load
        await load.more(2 * len(PROMPTS))


def workers(up):
    (listed,) = up.ps()
    return {each["name"]: each for each in listed["processes"] if each.get("role")}


def stop_a_starting_worker(up):
    """Stop a worker's process before it is ready, so that the rollout waits for it."""
    stopped = []

    def holds():
        for each in workers(up).values():
            if each["state"] == "starting" and each["pid"] is not None:
                process = psutil.Process(each["pid"])
                process.suspend()
                if workers(up)[each["name"]]["state"] == "starting":
                    stopped.append(process)
                    return True
                process.resume()
        return False

    until(holds)
    return stopped[0]


def test_streams_go_on_through_replicas_arguments_and_roles(up):
    graph = up.graph(roles={"aggregated": MOCK | {"replicas": 2}}, worker={"drain_timeout_s": 0.3})
    up.up(graph)

    async def main():
        async with streams(up) as load:
            for roles, expected in (
                ({"aggregated": MOCK | {"replicas": 3}}, {"aggregated": 3}),
                ({"aggregated": MOCK | {"replicas": 1}}, {"aggregated": 1}),
                ({"aggregated": MOCK | {"replicas": 2, "max_running_requests": 7}}, {"aggregated": 2}),
                ({"prefill": MOCK, "decode": MOCK}, {"prefill": 1, "decode": 1}),
            ):
                changed = up.graph(roles=roles, worker={"drain_timeout_s": 0.3})
                said = await asyncio.to_thread(up.run, "apply", changed)
                assert said.stdout.endswith("done\n")
                now = await asyncio.to_thread(workers, up)
                counts = [each["role"] for each in now.values() if each["state"] == "ready"]
                assert {role: counts.count(role) for role in counts} == expected
                await load.more(len(PROMPTS))
        assert {prompt: len(texts) for prompt, texts in load.answers.items()} == dict.fromkeys(PROMPTS, 1)

    asyncio.run(main())
    assert up.run("apply", graph).stdout == "nothing differs\n"


@pytest.mark.within(240)
async def test_a_model_revision_is_served_beside_the_former_one_and_never_by_its_kv(up):
    """Each answer is whole of one revision: KV of the former one, or tokens, would make a third text."""
    old, new = (up.folder / name for name in ("old", "new"))
    for directory in (old, new):
        shutil.copytree(MODEL_DIR, directory)
    weights = load_file(new / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in weights.items()}, new / "model.safetensors")
    fields = {"served_name": "penstock-demo", "roles": {"aggregated": {"weight_dtype": "float32"}}}
    up.up(up.graph(model=str(old), **fields))
    async with Load(up.url, PROMPTS, tokens=24) as load:
        await load.more(2 * len(PROMPTS))
        former = {prompt: set(texts) for prompt, texts in load.answers.items()}
        said = await asyncio.to_thread(up.run, "apply", up.graph(model=str(new), **fields))
        assert "replace workers beside the old ones, then switch" in said.stdout
        assert "the new revision takes requests" in said.stdout
        await load.more(3 * len(PROMPTS))
    async with Load(up.url, PROMPTS, tokens=24) as after:
        await after.more(len(PROMPTS))
    for prompt in PROMPTS:
        assert len(former[prompt]) == len(after.answers[prompt]) == 1
        assert former[prompt] != after.answers[prompt]
        assert load.answers[prompt] == former[prompt] | after.answers[prompt]


def test_a_worker_that_does_not_come_up_stops_the_rollout_and_the_old_ones_stay(up):
    graph = up.graph(roles={"aggregated": MOCK | {"replicas": 2}})
    up.up(graph)
    before = workers(up)

    async def main():
        async with streams(up):
            wrong = up.graph(
                "wrong.yaml", roles={"aggregated": MOCK | {"replicas": 2, "engine_args": {"x": 1}}}
            )
            return await asyncio.to_thread(up.run, "apply", wrong, "--name", "default", check=False)

    failed = asyncio.run(main())
    assert failed.returncode == 1
    assert "worker-3 does not come up: " in failed.stderr
    assert [each["pid"] for each in workers(up).values()] == [each["pid"] for each in before.values()]
    assert up.run("apply", graph).stdout == "nothing differs\n"


def test_what_cannot_be_changed_in_place_is_refused_before_anything_is_touched(up):
    up.up(up.graph())
    before = workers(up)
    changed = up.graph(
        roles={"aggregated": MOCK | {"replicas": 2}}, runtime={"registry": {"lease_ttl_s": 9}}, block_size=32
    )
    for arguments in ((), ("--dry-run",)):
        refused = up.run("apply", changed, *arguments, check=False)
        assert refused.returncode == 2
        assert "penstock: block_size: is 16, the file has 32: the KV of all workers" in refused.stderr
        assert "penstock: runtime.registry.lease_ttl_s: is " in refused.stderr
        assert "aggregated  replicas                      1    2    start 1" in refused.stdout
    assert workers(up).keys() == before.keys()
    dry = up.run("apply", up.graph(roles={"aggregated": MOCK | {"replicas": 2}}), "--dry-run")
    assert dry.stdout.splitlines()[1].split() == ["aggregated", "replicas", "1", "2", "start", "1"]
    assert workers(up).keys() == before.keys()
    up.run("scale", "aggregated", "3")
    dry = up.run("apply", up.graph(roles={"aggregated": MOCK | {"replicas": 2}}), "--dry-run")
    assert dry.stdout.splitlines()[1].split() == ["aggregated", "replicas", "1", "2", "drain", "1"]


def test_a_killed_command_a_killed_new_worker_and_a_second_command_leave_a_rollout_that_ends(up):
    up.up(up.graph(roles={"aggregated": MOCK | {"replicas": 2}}))
    changed = up.graph(roles={"aggregated": MOCK | {"replicas": 2, "max_running_requests": 9}})

    async def main():
        async with streams(up) as load:
            command = Up(up.folder, up.environment["XDG_RUNTIME_DIR"])
            applying = await asyncio.to_thread(command.start, "apply", changed)
            starting = await asyncio.to_thread(stop_a_starting_worker, up)
            second = await asyncio.to_thread(up.run, "apply", changed, check=False)
            assert second.returncode == 1
            assert "penstock apply is under way already" in second.stderr
            scaled = await asyncio.to_thread(up.run, "scale", "aggregated", "5", check=False)
            assert "penstock apply is under way; wait until it has ended" in scaled.stderr
            applying.kill()
            os.kill(starting.pid, signal.SIGKILL)
            await asyncio.to_thread(applying.wait)
            command.end()
            said = []

            def is_over():
                said[:] = [up.run("apply", changed, check=False)]
                return "under way" not in said[0].stderr

            await asyncio.to_thread(until, is_over)
            assert (said[0].returncode, said[0].stdout) == (0, "nothing differs\n"), said[0].stderr
        assert {prompt: len(texts) for prompt, texts in load.answers.items()} == dict.fromkeys(PROMPTS, 1)

    asyncio.run(main())
    templates = {each["template"] for each in workers(up).values()}
    assert len(templates) == 1
    assert len(workers(up)) == 2
