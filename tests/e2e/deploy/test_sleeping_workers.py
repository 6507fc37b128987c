"""Workers that sleep and wake while requests run: real processes, and the commands that ask for it."""

import asyncio
import json

from penstock.cli import main

PROMPT = "Which parts does a request pass on its way? " * 8


def test_requests_go_elsewhere_while_a_worker_sleeps(deploy, capfd):
    async def command(site, *words):
        capfd.readouterr()
        code = await asyncio.to_thread(main, [*words, "--url", site.url])
        return code, "".join(capfd.readouterr())

    async def post(site, path, body, kind="application/json"):
        headers = {"Content-Type": kind}
        async with site.http.post(f"{site.url}/admin/workers/{path}", data=body, headers=headers) as response:
            return response.status, await response.json()

    async def scenario(site):
        expected, _ = await site.tell(PROMPT, max_tokens=16)
        stopping = asyncio.Event()

        async def keep_asking():
            answered = 0
            while not stopping.is_set():
                assert (await site.tell(PROMPT, max_tokens=16))[0] == expected
                answered += 1
            return answered

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(keep_asking()) for _ in range(3)]
            for worker in ("worker-1", "worker-2"):
                code, said = await command(site, "sleep", worker)
                assert code == 0, said
                assert said.startswith(f"{worker}: asleep now; took ")
                shown = (await site.workers())[worker]
                assert (shown["state"], shown["condition"]) == ("asleep", "asleep")

                async def cache_is_gone(worker=worker):
                    view = (await site.workers())[worker]
                    return view["load"]["cached_blocks"] == view["indexed_blocks"] == 0

                await site.until(cache_is_gone, timeout_s=60)
                async with site.http.get(f"{site.url}/metrics") as response:
                    assert 'penstock_router_workers{condition="asleep"} 1.0' in await response.text()
                await asyncio.sleep(0.3)
                code, said = await command(site, "wake", worker)
                assert (code, said[: len(worker) + 11]) == (0, f"{worker}: ready now")
            stopping.set()
        assert all(task.result() > 0 for task in asking)

        assert await command(site, "sleep", "worker-9") == (
            1,
            "penstock: there is no worker 'worker-9'; known: worker-1, worker-2\n",
        )
        assert await command(site, "sleep", "worker-1", "--level", "7") == (
            1,
            "penstock: level: must be 1 or 2, got 7\n",
        )
        assert await command(site, "wake", "worker-1") == (1, "penstock: worker worker-1 is awake already\n")
        status, answer = await post(site, "worker-1/sleep", json.dumps({"level": "deep"}))
        assert (status, answer["error"]["message"]) == (400, "level: expected integer, got string 'deep'")
        assert (await post(site, "worker-1/sleep", "{}", "text/plain"))[0] == 415
        status, answer = await post(site, "worker-1/sleep", "")
        assert (status, answer["worker"], answer["state"]) == (200, "worker-1", "asleep")
        status, answer = await post(site, "worker-1/wake", "")
        assert (status, answer["worker"], answer["state"]) == (200, "worker-1", "ready")

    deploy(scenario, workers=2)
