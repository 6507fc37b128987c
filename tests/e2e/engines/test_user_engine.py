"""The engine of examples/echo_engine.py, served as docs/engines.md says."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.slow

ENGINE = Path(__file__).parents[3] / "examples" / "echo_engine.py"


BROKEN = """
import asyncio, time
from echo_engine import EchoEngine


class Broken(EchoEngine):
    def submit(self, request):
        asyncio.get_running_loop().call_soon(lambda: {}["callback"])
        super().submit(request)

    async def steps(self):
        async for step in super().steps():
            raise ValueError("no such layer\\nof this model")
            yield step


class Hangs(EchoEngine):
    async def close(self):
        await asyncio.to_thread(time.sleep, 600)


class Blocks(EchoEngine):
    async def close(self):
        time.sleep(600)
"""


@pytest.fixture
def broken(tmp_path, monkeypatch, deploy):
    (tmp_path / "echo_engine.py").write_text(ENGINE.read_text())
    (tmp_path / "broken_engine.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(scenario, engine, **more):
        deploy(scenario, role={"engine": f"broken_engine:{engine}"}, **more)

    return run


def test_a_bug_of_an_engine_is_one_line_for_each_failure(broken, capfd):
    async def scenario(site):
        with pytest.raises(openai.APIStatusError):
            await site.tell("say something", max_tokens=5)

    broken(scenario, "Broken", router={"no_worker_wait_s": 0.1, "migrations": {"stalled_s_max": 1}})
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    died = next(line for line in printed.splitlines() if "engine_died" in line)
    assert "ValueError: no such layer of this model" in died
    assert "broken_engine.py:" in died
    assert any("task_failed" in line and "KeyError: 'callback'" in line for line in printed.splitlines())


@pytest.mark.parametrize("engine", ["Hangs", "Blocks"])
def test_an_engine_that_does_not_close_ends_all_the_same(broken, engine):
    said = []

    async def scenario(site):
        assert (await site.tell("say something", max_tokens=5))[0]
        said.append(site.said)

    broken(scenario, engine, supervision={"close_timeout_s": 1.0, "spare_processes": 0})
    stopped = "worker-1 stopped killed as its engine did not close within 1 s (supervision.close_timeout_s)"
    assert stopped in said[0]


def test_the_engine_of_the_page_is_served(tmp_path, runtime_dir):
    (tmp_path / "echo_engine.py").write_text(ENGINE.read_text())
    command = [sys.executable, "-m", "penstock", "serve", "--demo", "--engine", "echo_engine:EchoEngine"]
    with subprocess.Popen(
        [*command, "--port", "0", "--workers", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            url = next(m[1] for line in process.stdout if (m := re.search(r"ready +(http://\S+)", line)))
            body = {"model": "penstock-demo", "prompt": "one two three four", "max_tokens": 40}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as response:
                answer = json.load(response)
        finally:
            process.terminate()
            process.stdout.close()
    assert "one two three fourone two three four" in answer["choices"][0]["text"].replace("</s>", "")
    assert answer["usage"]["completion_tokens"] == 40
