"""Streams of a deployment of processes, and what became of them."""

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

TIMEOUT_S = 90.0
TOKENS = 300
TOKEN = "a" * 40
"""For routes below /admin."""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def get(url: str, path: str) -> Any:
    words = ["curl", "-sS", "-m", "20", "-H", f"Authorization: Bearer {TOKEN}", url + path]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def stream(url: str) -> "subprocess.Popen[str]":
    body = {
        "model": "penstock-demo", "messages": [{"role": "user", "content": "Tell me"}], "seed": 7, "max_tokens": TOKENS,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    words = ["curl", "-sSN", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.Popen([*words, f"{url}/v1/chat/completions"], stdout=subprocess.PIPE, text=True)


def text_of(process: "subprocess.Popen[str]") -> tuple[str, int]:
    out, _ = process.communicate(timeout=TIMEOUT_S)
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    assert events, out
    assert all("error" not in event for event in events), out[-500:]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]


def child(supervisor: "subprocess.Popen[str]", name: str) -> psutil.Process | None:
    children = psutil.Process(supervisor.pid).children()
    return next((each for each in children if name in each.cmdline()), None)


def _workers(url: str) -> dict[str, Any]:
    return {each["name"]: each for each in get(url, "/admin/workers")["workers"]}


def ready(url: str) -> set[str]:
    return {name for name, each in _workers(url).items() if each["condition"] == "ready"}


def running(url: str, name: str) -> int:
    load = _workers(url).get(name, {}).get("load") or {}
    return int(load.get("running_requests", 0))
