"""KV in the memory of another host, in real processes: a worker loads what the other one's device has evicted.

Each worker runs in an IPC namespace of its own and has a host tier of its own, so that they are on two hosts as far as KV
transfers can tell. They reach each other by TCP.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from penstock.deploy.supervisor import child
from penstock.deploy.supervisor.resources.host_arena import HostArena
from tests.e2e.kv.test_peers_served import moved

HOSTS = {
    "router": {"policy": "round-robin", "disagg": {"link_bytes_per_s": 1e9}},
    "worker": {
        "kv_transfer": {"peers": True, "transfer": {"listen": ["tcp://127.0.0.1:0"], "transports": ["tcp"]}}
    },
}
PAGED = {
    "engine": "paged",
    "kv_blocks": 64,  # two prompts
    "weight_dtype": "float32",
    "max_batch_tokens": 64,
    "kv": {"host": "64MiB"},
}
SMALL = {
    "engine": "mock",
    "kv_blocks": 64,
    "mock": {"kv_bytes_per_block": 4096, "timing": {"prefill_s_per_token": 2e-3}},
    "kv": {"host": "64MiB"},
}
MOCK = {
    "engine": "mock",
    "kv_blocks": 150,  # a prompt and a half
    "mock": {"kv_bytes_per_block": 2 << 20, "timing": {"prefill_s_per_token": 1e-3}},
    "kv": {"host": "1GiB"},
}


@pytest.fixture
def two_hosts(deploy, monkeypatch):
    """Deploy two workers on two hosts."""
    original = child.command_line
    monkeypatch.setattr(child, "command_line", lambda *about: ["unshare", "--ipc", *original(*about)])
    monkeypatch.setattr(HostArena, "part", lambda _self, _role, _index: None)

    def run(scenario, role, **fields):
        deploy(scenario, role=role, workers=2, **{"timeout_s": 180.0} | HOSTS | fields)

    return run


def ipc_namespace(pid):
    return Path(f"/proc/{pid}/ns/ipc").readlink()


@pytest.mark.needs("ipc-namespaces")
@pytest.mark.parametrize(
    "role", [pytest.param(SMALL, id="mock"), pytest.param(PAGED, id="paged", marks=pytest.mark.nightly)]
)
def test_what_the_other_host_keeps_in_memory_is_loaded_and_answers_are_the_same(two_hosts, role):
    async def scenario(site):
        pids = [worker["pid"] for worker in (await site.workers()).values()]
        assert len({ipc_namespace(pid) for pid in pids}) == 2
        await moved(site, 0.6)  # two of seven are on a device

        async def nothing_is_held():
            return not any([(await site.load(name))["active_blocks"] for name in await site.workers()])

        await site.until(nothing_is_held)
        for name in await site.workers():
            load = await site.load(name)
            assert (load["failed_steps"], load["kv_corrupt"]) == (0, 0)
            assert not load["kv_tiers"][0]["hit_tokens"], "its own host tier had none of it"

    two_hosts(scenario, role)


@pytest.mark.slow
@pytest.mark.needs("ipc-namespaces")
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.nightly),
    ],
)
def test_a_host_that_is_lost_while_its_memory_is_read_costs_time_alone(two_hosts, fault):
    """Blocks of 2 MiB: a prompt is copied in a tenth of a second, within which its holder dies or hangs."""

    def text(kind, number):
        return f"{kind} {number} " + " ".join(f"lake {number * 31 + word}" for word in range(400))

    async def scenario(site):
        broken = 0
        for number in range(8):
            before = {name: worker["pid"] for name, worker in (await site.workers()).items()}
            first = (await site.tell(text("a", number), max_tokens=8))[0]
            for kind in "bc":  # the other worker's, and the one that evicts the first
                await site.tell(text(kind, number), max_tokens=8)
            held = {name: await site.load(name) for name in before}
            reader, holder = sorted(held, key=lambda name: held[name]["steps"])
            failures = held[reader]["peer_failures"]
            asked = asyncio.create_task(site.tell(text("a", number), max_tokens=8))
            await asyncio.sleep(0.02 + 0.02 * number)
            victim = site.deployment.pids()[holder]
            os.kill(victim, fault)
            try:
                assert (await asked)[0] == first
                load = await site.load(reader)
                print(number, held, load["peer_failures"], load["peer_tokens"])
                broken += load["peer_failures"] - failures
                assert load["failed_steps"] == 0
            finally:
                if fault is signal.SIGSTOP:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGCONT)

            async def is_back():
                return await site.ready_workers() == 2

            await site.until(is_back)
            if broken:
                break
        assert broken, "no fault came while a load was under way"

    two_hosts(scenario, MOCK, timeout_s=180)
