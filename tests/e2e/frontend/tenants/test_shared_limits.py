"""A tenant's limits over two real frontend processes on one port, with a real key file."""

from pathlib import Path

import pytest

from penstock.frontend.tenants.api_key import hash_of, new_key

pytestmark = pytest.mark.slow

PLACES, TRIES = 4, 12


def test_a_concurrency_holds_over_both_processes(deploy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    key = new_key()
    file = tmp_path / "keys.yaml"
    file.write_text(f"tenants:\n  wide:\n    concurrency: {PLACES}\n    keys: [{hash_of(key)}]\n")

    async def scenario(site) -> None:
        def ask(max_tokens: int):
            """Ask on a connection of its own, so that each process is asked."""
            headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
            said = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, "stream": True}
            body = {"model": "penstock-demo", "max_tokens": max_tokens} | said
            return site.http.post(f"{site.url}/v1/chat/completions", json=body, headers=headers)

        held = [await ask(1000) for _ in range(PLACES)]
        assert {response.status for response in held} == {200}

        async def all_are_refused() -> bool:
            for _ in range(TRIES):
                async with ask(1) as response:
                    if response.status == 200:
                        return False
                    assert (response.status, response.headers["Retry-After"]) == (429, "1")
                    assert "its limit concurrency is 4" in (await response.json())["error"]["message"]
            return True

        await site.until(all_are_refused)
        assert not any(response.content.is_eof() for response in held), "all of them are still in flight"
        for response in held:
            response.close()

        async def is_free() -> bool:
            async with ask(1) as response:
                return response.status == 200

        await site.until(is_free)

    frontend = {"port": 0, "processes": 2, "drain_timeout_s": 10, "api_key_file": str(file)}
    deploy(scenario, workers=2, frontend=frontend, role={"mock": {"timing": {"step_s": 0.1}}}, timeout_s=120)
