"""`penstock profile` as people run it: an engine in its process, endpoints over real sockets, and what goes wrong."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.processes.served import served
from penstock.cli import main
from penstock.perf.profile import Profile, ProfiledModel

pytestmark = pytest.mark.slow

GRAPH = """
model: demo
roles:
  aggregated:
    replicas: 2
"""
WORKLOAD = """
requests: 40
rate_per_s: 5
input_tokens: 200
output_tokens: 30
"""


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 2) -> str:
    assert main(["profile", *map(str, arguments)]) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.engine
def test_the_paged_engine_is_profiled_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    flags = "--quick --repeats 2 --batches 1,4 --contexts 64,512 --seed 3 --held-out 2"
    assert main(["profile", "paged", "--out", str(out), *flags.split()]) == 0
    captured = capsys.readouterr()
    assert "held-out points: median error of TTFT" in captured.out
    assert "0 of " in captured.err, "a line now and then, as nobody watches a terminal"
    profile = Profile.load(out)
    made = (profile.engine, profile.model, profile.hardware, profile.seed)
    assert made == ("paged", "penstock-demo", "cpu", 3)
    assert profile.engine_version.startswith("penstock ")
    assert "torch" in profile.engine_version
    assert profile.measured_at.endswith("+00:00")
    assert profile.machine
    assert profile.evaluation is not None
    assert len(profile.evaluation.cells) == len(profile.points)
    assert {(p.batch, round(p.context, -1)) for p in profile.decode} == {(1, 60), (1, 510), (4, 60), (4, 510)}
    model = ProfiledModel(profile)
    assert model.prefill_s(16) > 0
    assert {path.name for path in tmp_path.iterdir()} == {"profile.json", "profile.html"}
    page = (tmp_path / "profile.html").read_text()
    assert page.count("<figure") == 5

    (tmp_path / "graph.yaml").write_text(GRAPH)
    (tmp_path / "chat.yaml").write_text(WORKLOAD)
    report = tmp_path / "report.json"
    arguments = [str(tmp_path / "chat.yaml"), "--graph", str(tmp_path / "graph.yaml"), "--json", str(report)]
    assert main(["simulate", *arguments, "--engine-profile", str(out)]) == 0
    simulated = json.loads(report.read_text())
    assert simulated["completed"] == 40
    assert simulated["itl_s"]["p50"] == pytest.approx(model.decode_step_s(1, 200), rel=0.5)


def test_a_served_mock_engine_is_profiled(tmp_path: Path) -> None:
    """How well its speed is found is seen on virtual time, in tests/unit/profiling."""
    out = tmp_path / "profile.json"
    flags = "--prompt-tokens 32,128,450 --contexts 64,400 --batches 1,4 --repeats 1 --hardware h200"
    with served("--engine", "mock") as deployment:
        assert main(["profile", f"{deployment.url}/v1", "--out", str(out), *flags.split()]) == 0
        profile = Profile.load(out)
        assert profile.model == deployment.model
    assert (profile.engine, profile.hardware) == (deployment.url, "h200")
    assert "aiohttp" in profile.engine_version
    assert any(point.cached_tokens > 300 for point in profile.prefill), "the server tells of its prefix cache"
    assert profile.evaluation is not None
    assert profile.evaluation.itl_median_error is not None


# ---- endpoints that cannot be profiled -------------------------------------------------------------------


@contextmanager
def endpoint(answer: Callable[[web.Request, dict], object], path: str = "/v1/completions") -> Iterator[str]:
    """Serve /v1/models with the models `a` and `b`, and whatever `answer` makes of a completion."""
    started, stop = threading.Event(), asyncio.Event()
    urls: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}, {"id": "b"}]})

    async def complete(request: web.Request) -> object:
        made = answer(request, json.loads(await request.read()))
        return await made if asyncio.iscoroutine(made) else made

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post(path, complete)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        loops.append(asyncio.get_running_loop())
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()
        await stop.wait()
        await asyncio.sleep(0.1)  # connections that were given up are still being accepted, and would stay
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield urls[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(60)


async def stream(request: web.Request, *events: dict | str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        data = event if isinstance(event, str) else json.dumps(event)
        await response.write(f"data: {data}\n\n".encode())
    return response


def words(count: int, **usage: int) -> list[dict | str]:
    texts = [{"choices": [{"text": "word "}]} for _ in range(count)]
    return [
        *texts,
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count} | usage},
        "[DONE]",
    ]


def test_an_endpoint_that_does_not_stream_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"

    def whole(_: web.Request, body: dict) -> web.Response:
        return web.json_response({"choices": [{"text": "all at once"}], "usage": {"completion_tokens": 3}})

    async def one_piece(request: web.Request, body: dict) -> web.StreamResponse:
        text = {"choices": [{"text": "word " * body["max_tokens"]}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}}
        return await stream(request, text, usage, "[DONE]")

    with endpoint(whole) as url:
        assert f"{url}: its answer is no stream of server-sent events" in refusal(
            capsys, url, "--model", "a", "--out", out
        )
    with endpoint(one_piece) as url:
        assert "16 tokens came in one piece; it has to stream token by token" in refusal(
            capsys, url, "--model", "a", "--out", out
        )
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_that_goes_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict] = []

    async def stuck(request: web.Request, body: dict) -> web.StreamResponse:
        asked.append(body)
        if len(asked) > 4:
            await asyncio.sleep(30)
        return await stream(request, *words(body["max_tokens"]))

    # the sweep's own limit comes first: silence is not taken for the end of a measurement
    flags = ("--model", "a", "--quick", "--request-timeout", "2", "--max-seconds", "1")
    with endpoint(stuck) as url:
        error = refusal(capsys, url, *flags, "--out", tmp_path / "p.json", code=1)
    assert f"{url} stopped answering: no end of the answer after 2 s; is it stuck?" in error
    assert list(tmp_path.iterdir()) == []


def test_nobody_at_the_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(capsys, "http://127.0.0.1:9", "--out", tmp_path / "p.json", code=1)
    assert error.startswith("penstock: ENGINE_OR_URL: http://127.0.0.1:9: nobody answers (")
    assert error.endswith("is the server started?\n")


# ---- what is typed wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pagd",), "ENGINE_OR_URL: 'pagd' is neither a URL such as http://127.0.0.1:8000 nor an engine; did you"),
        (("localhost:8000",), "ENGINE_OR_URL: 'localhost:8000' is neither a URL"),
        (("http://:x/",), "ENGINE_OR_URL: 'http://:x/': "),
        (("mock", "--batches", "1,x"), "--batches: '1,x': expected whole numbers >= 1 with commas"),
        (("mock", "--contexts", "0"), "--contexts: '0': expected whole numbers >= 1"),
        (("mock", "--repeats", "0"), "--repeats: must be >= 1, got 0"),
        (("mock", "--held-out", "-1"), "--held-out: must be >= 0, got -1"),
        (("mock", "--max-seconds", "-1"), "--max-seconds: must be > 0, got -1"),
        (("mock", "--max-seconds", "nan"), "--max-seconds: must be > 0, got nan"),
        (("mock", "--request-timeout", "0"), "--request-timeout: must be > 0, got 0"),
        (("mock", "--batches", "500"), "the engine runs at most 64 requests at once"),
        (("mock", "--model", "/nope"), "model: no such directory: /nope"),
        (("mock", "--hardware", "h900"), "--hardware: roles.aggregated.hardware: unknown 'h900'; did you mean 'h200'?"),
        (("mock", "--plot", "p.png"), "--plot: p.png: it is a page of charts; name it .html"),
        (("mock", "--api-key", "k"), "--api-key: only with a URL"),
        (("http://127.0.0.1:9", "--set", "a=1"), "--set: only with an engine"),
        (("paged", "--set", "roles.aggregated.tensor_parallel=2"), "roles.aggregated.tensor_parallel: must be 1"),
        (("mock", "--out", "/absent/p.json"), "--out: /absent/p.json: cannot be written: no such file or directory"),
        (("mock", "--out", "/tmp"), "--out: /tmp is a directory"),
        (("mock", "--out", "p.html"), "--out: p.html: the profile is JSON"),
        (("mock", "--max-seconds", "0.01"), "decode cells were measured in that time, the fit needs 3 of each"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = () if "--out" in arguments else ("--out", tmp_path / "p.json")
    assert expected in refusal(capsys, *arguments, *out)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    out.write_text("the one before")
    command = [sys.executable, "-m", "penstock", "profile", "mock", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        assert "0 of " in process.stderr.readline()
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error.splitlines()[-1] == "penstock profile: interrupted; nothing was written"
    assert "Traceback" not in error
    assert out.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [out]
