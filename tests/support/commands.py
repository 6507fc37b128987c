"""Commands as processes whose output is read line by line, and streams by curl."""

import json
import queue
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 90.0


class Commands:
    """Starts commands, and waits for lines of the one that was started last."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()

    def spawn(
        self, words: Sequence[str], *, environment: Mapping[str, str], cwd: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start a command; `wait` reads what it says, and `end` ends it."""
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, env=environment
        )
        output, lines = process.stdout, queue.Queue[str | None]()
        assert output is not None, "a pipe"

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        self._lines = lines
        return process

    def wait(self, pattern: str) -> str:
        """Wait for a line of what was started last."""
        deadline = time.monotonic() + TIMEOUT_S
        with suppress(queue.Empty):
            while (line := self._lines.get(timeout=max(0.1, deadline - time.monotonic()))) is not None:
                self.lines.append(line.rstrip())
                if re.search(pattern, line):
                    return line
        raise AssertionError(f"ended or waited without {pattern!r}: {self.lines}")


def end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def stream_words(url: str, max_tokens: int, content: str = "Tell me") -> list[str]:
    """Give the command of a seeded stream; `text_of` reads it."""
    body = {
        "model": "penstock-demo", "messages": [{"role": "user", "content": content}], "seed": 7,
        "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    words = ["curl", "-sSN", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return [*words, f"{url}/v1/chat/completions"]


def text_of(stream: "subprocess.Popen[str]") -> tuple[str, int]:
    """Wait for a stream's end; return its text and the number of tokens."""
    out, _ = stream.communicate(timeout=TIMEOUT_S)
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    assert events, out
    assert all("error" not in event for event in events), out[-500:]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return text, events[-1]["usage"]["completion_tokens"]
