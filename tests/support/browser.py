"""Drives a headless Chromium by its DevTools protocol over a pipe: no client library, no port."""

import base64
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost", "--remote-debugging-pipe",
]  # fmt: skip
_PATIENCE_S = 90.0


class Page:
    """One tab of a browser of its own. Whoever enters it gets an empty tab."""

    def __init__(self, *, width: int = 1280, height: int = 900) -> None:
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._number = 0
        self._begun = b""
        self._session = ""
        self.problems: list[str] = []
        """Uncaught errors, and errors that the page wrote to its console."""
        self.asked: list[str] = []
        """URLs that the page has asked for."""

    def __enter__(self) -> Self:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        command = ["chromium", *FLAGS, f"--user-data-dir={self._profile.name}"]
        # Chromium reads from descriptor 3 and writes to 4; higher ones make room first, as theirs may be 3 or 4 already.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "chromium", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "XDG_RUNTIME_DIR": self._profile.name, "HOME": self._profile.name},
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", self._size)
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self._call("Page.navigate", {"url": url})

    def run(self, script: str) -> Any:
        """Run an expression in the page, await it if it is a promise, and give its value."""
        done = self._call(
            "Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True}
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, script: str) -> Any:
        """Run an expression again and again until its value is true, and give that."""
        until_s = time.monotonic() + _PATIENCE_S
        while not (value := self.run(f"(() => {{ try {{ return {script}; }} catch {{ return null; }} }})()")):
            assert time.monotonic() < until_s, f"never true: {script}\nproblems: {self.problems}"
            time.sleep(0.05)
        return value

    def press(self, key: str, *, text: str = "") -> None:
        """Press a key, such as Tab or Enter."""
        code = {"Tab": 9, "Enter": 13, " ": 32, "Escape": 27}.get(key, 0)
        event = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        self._call("Input.dispatchKeyEvent", {"type": "keyDown", **event})
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def write(self, text: str) -> None:
        """Write text into what has the focus."""
        self._call("Input.insertText", {"text": text})

    def show_as(self, theme: str) -> None:
        """Have the system prefer a light or a dark theme."""
        self._call(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )

    def accessible(self) -> list[tuple[str, str]]:
        """List (role, name) of all nodes as a screen reader meets them."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def screenshot(self, path: Path, *, of: str | None = None) -> None:
        """Write a PNG of what is seen, or of the element that a selector finds."""
        options: dict[str, Any] = {"format": "png"}
        if of is not None:
            box = self.run(
                f"(() => {{ const b = document.querySelector({of!r}).getBoundingClientRect();"
                " return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height, scale: 1}; })()"
            )
            options |= {"clip": box, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", options)["data"]))

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            said = self._hear()
            if said.get("id") == self._number:
                assert "error" not in said, (method, said["error"])
                result: dict[str, Any] = said["result"]
                return result
            self._note(said)

    def _note(self, said: dict[str, Any]) -> None:
        parameters = said.get("params", {})
        match said.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in {"error", "warning", "assert"}:
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])

    def _hear(self) -> dict[str, Any]:
        until_s = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._begun:
            ready, _, _ = select.select([self._read], [], [], until_s - time.monotonic())
            assert ready, "the browser does not answer"
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._begun += received
        line, _, self._begun = self._begun.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        return said
