"""Why requests went where they did, asked as people ask: by header with the openai client, and by `penstock explain`."""

import asyncio
import json

import openai
import pytest

from penstock.cli import main
from penstock.core import log

pytestmark = pytest.mark.slow

MODEL = "penstock-demo"
LONG = "Tell me about rivers. " * 40
EXPLAINS = {"port": 0, "explains": True}
WHY = {"X-Penstock-Explain": "1"}
HELLO = [{"role": "user", "content": LONG}]


async def explain(capsys, *arguments: str) -> tuple[int, str]:
    """Run the command beside the event loop that serves; give its exit code and what it printed."""
    capsys.readouterr()
    code = await asyncio.to_thread(main, ["explain", *arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_openai_client_gets_the_reasons_and_so_does_the_command(deploy, capsys):
    async def scenario(site):
        create = site.client.chat.completions.create
        await create(model=MODEL, messages=HELLO, max_tokens=3)
        whole = await create(model=MODEL, messages=HELLO, max_tokens=3, n=2, extra_headers=WHY)
        decisions = whole.model_extra["penstock"]["decisions"]
        assert [one["request_id"] for one in decisions] == [f"{whole.id}-0", f"{whole.id}-1"]
        assert [one["num_candidates"] for one in decisions] == [2, 1], "the second goes where the first went"
        for one in decisions:
            assert (one["unit"], one["policy"]) == ("ms", "kv")
            for candidate in one["candidates"]:
                assert candidate["cost"] == pytest.approx(sum(candidate["terms"].values()))
        assert decisions[0]["candidates"][0]["tier_blocks"]["device"] > 10

        chunks = [
            chunk
            async for chunk in await create(
                model=MODEL, messages=HELLO, max_tokens=3, stream=True, extra_headers=WHY,
                stream_options={"include_usage": True},
            )
        ]  # fmt: skip
        told = [chunk for chunk in chunks if "penstock" in chunk.model_extra]
        assert [chunk.choices[0].finish_reason for chunk in told] == ["length"], "with the end of the choice"
        assert chunks[-1].usage.completion_tokens == 3
        (one,) = told[0].model_extra["penstock"]["decisions"]

        plain = await site.client.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_headers=WHY)
        assert len(plain.model_extra["penstock"]["decisions"]) == 1
        silent = await create(model=MODEL, messages=HELLO, max_tokens=3)
        assert silent.model_extra == {}
        with pytest.raises(openai.BadRequestError, match="X-Penstock-Explain: must be 1 or 0, got 'yes'"):
            await create(model=MODEL, messages=HELLO, extra_headers={"X-Penstock-Explain": "yes"})

        code, text = await explain(capsys, silent.id, "--url", site.url)
        assert code == 0
        assert f"{silent.id}-0" in text
        assert "longest_prefix" in text
        title, reason, head, *rows = text.splitlines()
        assert head.split()[:4] == ["worker", "cost", "ms", "queue"]
        assert sorted(row.split()[0] for row in rows) == ["worker-1", "worker-2"]
        assert f"to {rows[0].split()[0]}" in reason
        code, text = await explain(capsys, "--last", "2", "--json", "--url", f"{site.url}/v1")
        assert title.endswith(f"policy kv  by process {json.loads(text)['pid']}")
        assert [one["request_id"] for one in json.loads(text)["decisions"]] == [
            f"{plain.id}-0",
            f"{silent.id}-0",
        ]
        code, text = await explain(capsys, "chatcmpl-0", "--url", site.url)
        assert (code, "no decision about 'chatcmpl-0' is known here" in text) == (1, True)
        for url, expected, text in (
            ("http://127.0.0.1:9", 1, "nobody answers"),
            ("127.0.0.1:8000", 2, "expected a URL such as"),
        ):
            code, said = await explain(capsys, "x", "--url", url)
            assert (code, text in said) == (expected, True), said

    deploy(scenario, workers=2, frontend=EXPLAINS)


def test_decisions_of_all_processes_are_found_and_one_may_keep_silent(deploy, capsys):
    async def scenario(site):
        ids = []
        for _ in range(4):
            async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="none") as client:
                answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1)
                with pytest.raises(openai.PermissionDeniedError, match=r"frontend\.explains"):
                    await client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=WHY)
            code, text = await explain(capsys, answer.id, "--url", site.url)
            assert (code, f"{answer.id}-0" in text) == (0, True), text
            ids.append(f"{answer.id}-0")
        code, text = await explain(capsys, "--last", "3", "--url", site.url)
        assert [line.split()[0] for line in text.splitlines() if "policy kv  by process" in line] == ids[1:]
        code, text = await explain(capsys, "--last", "3", "--json", "--url", site.url)
        assert json.loads(text)["decisions"][-1]["request_id"] == ids[-1]

    deploy(scenario, frontend={"port": 0, "processes": 2})


def test_a_log_of_a_deployment_is_replayed(deploy, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")

    async def scenario(site):
        await asyncio.gather(*(site.tell(f"{n % 3} {LONG}", max_tokens=4) for n in range(12)))

    deploy(scenario, workers=3, log_level="debug", frontend=EXPLAINS)
    file = tmp_path / "log.jsonl"
    file.write_text(capfd.readouterr().err)
    assert main(["explain", "--replay", str(file)]) == 0
    assert "12 decisions by the policies that made them: 12 the same, 0 not" in capfd.readouterr().out
    assert main(["explain", "--replay", str(file), "--policy", "random"]) == 0
    out = capfd.readouterr().out
    assert "12 decisions by random: " in out
    assert " -> worker-" in out
    changed = file.read_text().replace('"slot": 0', '"slot": 1').replace('"slot": 2', '"slot": 1')
    file.write_text(changed.replace('"worker": "worker-', '"worker": "someone-'))
    assert main(["explain", "--replay", str(file)]) == 1
    for arguments, text in (
        (["--replay", str(tmp_path / "none")], "none: No such file"),
        (["--replay", __file__], "no decisions in"),
        (["--replay", str(file), "--policy", "best"], "policy 'best' is unknown"),
        (["--policy", "kv"], "--policy: is for --replay FILE"),
        (["x", "--last", "3"], "x and --last"),
        ([""], "REQUEST_ID: must be an answer's id"),
        (["--replay", str(file), "--json"], "--json: is for what a server says"),
        (["--last", "0"], "--last: must be 1 to 64, got 0"),
    ):
        assert main(["explain", *arguments]) == 2
        assert text in capfd.readouterr().err
    log.configure("warning", process="supervisor")
