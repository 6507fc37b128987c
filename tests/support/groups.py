"""Streams of a deployment of processes, and what became of them."""

import json
import subprocess
from typing import Any

import psutil

from tests.support.commands import TIMEOUT_S, stream_words, text_of, until

__all__ = ["TIMEOUT_S", "TOKEN", "TOKENS", "child", "get", "ready", "running", "stream", "text_of", "until"]
TOKENS = 300
TOKEN = "a" * 40
"""For routes below /admin."""


def get(url: str, path: str) -> Any:
    words = ["curl", "-sS", "-m", "20", "-H", f"Authorization: Bearer {TOKEN}", url + path]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def stream(url: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(stream_words(url, TOKENS), stdout=subprocess.PIPE, text=True)


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
