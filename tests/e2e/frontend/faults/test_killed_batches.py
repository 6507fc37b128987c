"""A batch goes on when the frontend that runs it is killed, and when the whole deployment is started anew."""

import json
import os
import signal

import pytest

LINES = 150
SLOW = {"mock": {"timing": {"step_s": 0.02}}}

pytestmark = pytest.mark.slow


def lines() -> bytes:
    body = {"model": "penstock-demo", "max_tokens": 8}
    return b"".join(
        json.dumps(
            {
                "custom_id": f"r{index}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body | {"messages": [{"role": "user", "content": f"say {index}"}]},
            }
        ).encode()
        + b"\n"
        for index in range(LINES)
    )


def test_each_line_is_answered_once(deploy, tmp_path):
    batches = {"directory": str(tmp_path / "batches"), "at_once": 4}
    frontend = {"port": 0, "processes": 2, "drain_timeout_s": 1, "batches": batches}
    started = {}

    async def answered(site, batch_id: str) -> int:
        try:
            counts = (await site.client.batches.retrieve(batch_id)).request_counts
        except Exception:  # noqa: BLE001 - the frontend that was asked is the killed one
            return 0
        return counts.completed

    async def first(site):
        stored = await site.client.files.create(file=("in.jsonl", lines()), purpose="batch")
        batch = await site.client.batches.create(
            input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        started["id"] = batch.id

        async def some() -> bool:
            return await answered(site, batch.id) >= 20

        await site.until(some)
        for name, pid in site.deployment.pids().items():
            if name.startswith("frontend"):
                os.kill(pid, signal.SIGKILL)

        async def more() -> bool:
            return await answered(site, batch.id) >= 60

        await site.until(more)

    async def second(site):
        async def completed() -> bool:
            batch = await site.client.batches.retrieve(started["id"])
            started["batch"] = batch
            return batch.status == "completed"

        await site.until(completed, timeout_s=120)
        batch = started["batch"]
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        assert batch.error_file_id is None
        output = (await site.client.files.content(batch.output_file_id)).text.splitlines()
        assert sorted(json.loads(line)["custom_id"] for line in output) == sorted(
            f"r{i}" for i in range(LINES)
        )
        answers = [json.loads(line)["response"]["body"] for line in output]
        assert {answer["usage"]["completion_tokens"] for answer in answers} <= set(range(1, 9))

    deploy(first, frontend=frontend, timeout_s=180, role=SLOW)
    deploy(second, frontend=frontend, timeout_s=180, role=SLOW)
