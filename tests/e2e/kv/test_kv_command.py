"""`penstock kv` against real processes."""

import asyncio
import json

import pytest

from penstock.cli import main

MOCK = {
    "engine": "mock",
    "kv_blocks": 128,
    "mock": {"kv_bytes_per_block": 256},
    "kv": {"host": "4x"},
    "retention": {"pinned_share": 0.5},
}
WORDS = " ".join(f"river {word}" for word in range(80))


def test_operators_see_pin_and_flush_what_workers_keep(deploy, capsys, tmp_path):
    async def scenario(site):
        async def kv(action, *arguments):
            capsys.readouterr()
            code = await asyncio.to_thread(main, ["kv", action, "--url", site.url, *arguments])
            out, err = capsys.readouterr()
            return code, out if code == 0 else err

        async def cached(text):
            answer = await site.client.completions.create(model="penstock-demo", prompt=text, max_tokens=1)
            return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens

        (name,) = await site.workers()
        text = "the system prompt " + WORDS
        code, told = await kv("prefetch", "--text", text)
        assert code == 0
        total = int(told.split()[0])
        assert told == f"{total} tokens: 0 were cached, {total} are computed\n"
        blocks = total // 16

        file = tmp_path / "prompt.txt"
        file.write_text(text)
        assert await kv("pin", "system", "--text-file", str(file), "--ttl", "300") == (
            0,
            f"{name}: {blocks} blocks pinned\n",
        )
        code, told = await kv("ls")
        assert code == 0
        assert f"pin system: {blocks} blocks, ends in" in told
        assert "  host " in told
        for number in range(30):
            await cached(f"{number} {number * 7} " + WORDS)
        assert (await cached(text))[0] == (total - 1) // 16 * 16
        code, told = await kv("stats", "--worker", name)
        assert "offloaded_blocks" in told

        assert await kv("evict", "--text", text) == (0, f"{name}: 0 blocks evicted\n")  # it is pinned
        assert await kv("unpin", "system") == (0, f"{name}: {blocks} blocks unpinned\n")
        assert await kv("unpin", "system") == (1, "penstock: there is no pin 'system' here\n")
        assert await kv("evict", "--text", text) == (0, f"{name}: {blocks} blocks evicted\n")

        before = (await site.load(name))["cached_blocks"]
        code, told = await kv("pin", "x", "--text", "another " + text, "--ttl", "99999")
        assert (code, told.split(",")[0]) == (1, "penstock: ttl_s: must be <= 3600")
        assert (await site.load(name))["cached_blocks"] == before, "refused before anything is computed"

        chat = tmp_path / "messages.json"
        chat.write_text(json.dumps([{"role": "system", "content": WORDS}]))
        assert (await kv("pin", "chat", "--messages", str(chat)))[0] == 0
        code, told = await kv("flush")
        assert told.endswith("blocks flushed\n")
        assert (await site.load(name))["failed_steps"] == 0
        assert (await cached(text))[0] == 0
        code, told = await kv("flush", "--tier", "device")
        assert f"{total // 16} blocks flushed" in told
        assert (await cached(text))[0] > 0  # from the host

        assert (await kv("flush", "--tier", "host"))[1].startswith(
            "penstock: tier: must be device, or left out"
        )
        assert (await kv("pin", "x", "--text", "short"))[1].startswith(
            "penstock: prompt: must have 16 tokens, a block,"
        )
        assert (await kv("ls", "--worker", "nobody"))[0] != 0
        async with site.http.post(f"{site.url}/admin/kv/pin", json={"prompt": text, "nam": "a"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "nam")
        async with site.http.get(
            f"{site.url}/admin/kv", headers={"Authorization": "Bearer wrong"}
        ) as response:
            assert response.status == 401

    deploy(scenario, role=MOCK)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["pin", "a"], "one of the arguments"),
        (["pin", "a", "--tokens", "/nowhere"], "--tokens: /nowhere: cannot be read"),
        (["ls", "--url", "nowhere"], "--url: 'nowhere': expected a URL"),
        (["ls", "--url", "http://127.0.0.1:1"], "nobody answers"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, text):
    assert main(["kv", *arguments]) in (1, 2)
    assert text in capsys.readouterr().err
