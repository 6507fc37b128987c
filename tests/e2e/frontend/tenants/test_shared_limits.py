"""A tenant's limits over two real frontend processes on one port, with a real key file."""

import asyncio
from pathlib import Path

import pytest

from penstock.frontend.tenants.api_key import hash_of, new_key

pytestmark = pytest.mark.slow

PER_S, SECONDS = 10.0, 8.0
PLACES, TRIES = 4, 16


def test_a_rate_and_a_concurrency_hold_over_both_processes(deploy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    fast, wide = new_key(), new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(
        f"tenants:\n  fast:\n    requests_per_s: {PER_S}\n    keys: [{hash_of(fast)}]\n"
        f"  wide:\n    concurrency: {PLACES}\n    keys: [{hash_of(wide)}]\n"
    )

    async def scenario(site) -> None:
        loop = asyncio.get_running_loop()

        def ask(key: str, max_tokens: int):
            headers = {
                "Authorization": f"Bearer {key}",
                "Connection": "close",
            }  # so that each process is asked
            body = {
                "model": "penstock-demo",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": True,
            }
            return site.http.post(f"{site.url}/v1/chat/completions", json=body, headers=headers)

        async def flood(end_s: float) -> list[int]:
            statuses = []
            while loop.time() < end_s:
                async with ask(fast, 1) as response:
                    await response.read()
                    statuses.append(response.status)
            return statuses

        start_s = loop.time()
        asked = await asyncio.gather(*(flood(start_s + SECONDS) for _ in range(8)))
        elapsed_s = loop.time() - start_s
        statuses = [status for each in asked for status in each]
        assert set(statuses) == {200, 429}
        assert PER_S * SECONDS / 2 <= statuses.count(200) <= PER_S * (elapsed_s + 3), (
            "a burst at each, the rate, and a second in reserve"
        )

        first = await ask(wide, 1000)
        await asyncio.sleep(2.0)  # each process hears of it
        held = [first]
        for _ in range(TRIES):
            response = await ask(wide, 1000)
            if response.status == 200:
                held.append(response)
            else:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
                assert "its limit concurrency is 4" in (await response.json())["error"]["message"]
                response.release()
            await asyncio.sleep(0.05)
        assert PLACES <= len(held) <= PLACES + 1
        assert not any(response.content.is_eof() for response in held), "all of them are still in flight"
        for response in held:
            response.close()

        async def is_free() -> bool:
            async with ask(wide, 1) as response:
                return response.status == 200

        await site.until(is_free)

    frontend = {"port": 0, "processes": 2, "drain_timeout_s": 10, "api_key_file": str(file)}
    deploy(scenario, workers=2, frontend=frontend)
