"""Renders a page with charts in a real browser without a network."""

import json
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--proxy-server=127.0.0.1:9", "--virtual-time-budget=5000", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
]  # fmt: skip


@dataclass
class Shown:
    """A rendered page."""

    dom: str
    console: list[str]
    asked: list[str]
    """Network requests made by the page."""


def show(path):
    offline = (
        ["unshare", "-n"]
        if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0
        else []
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "net.json"
        command = [
            *offline,
            "chromium",
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--log-net-log={log}",
            "--dump-dom",
        ]
        process = subprocess.Popen(
            [*command, path.as_uri()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            dom, said = process.communicate(timeout=90)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, said
        events = json.loads(log.read_text())["events"]
    starts = [
        event.get("params", {}) for event in events if "network_isolation_key" in event.get("params", {})
    ]
    asked = [str(params) for params in starts if "file://" in params["network_isolation_key"]]
    return Shown(dom, re.findall(r"CONSOLE.*", said), asked)


class Charts(HTMLParser):
    """What the browser made of each chart, in the order of the page.

    inks:     pixels that are drawn, as `COUNT_INK` counted them
    readings: the legend, with the values under the pointer
    """

    def __init__(self, dom):
        super().__init__()
        self.inks = []
        self.readings = []
        self._is_legend = False
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "canvas":
            self.inks.append(int(attributes["data-ink"]))
        if tag == "table" and "u-legend" in (attributes.get("class") or "").split():
            self._is_legend = True
            self.readings.append("")

    def handle_data(self, data):
        if self._is_legend:
            self.readings[-1] += data

    def handle_endtag(self, tag):
        if tag == "table":
            self._is_legend = False


COUNT_INK = """<script>
setTimeout(() => {
  for (const canvas of document.querySelectorAll("canvas")) {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    canvas.dataset.ink = pixels.filter((value, index) => index % 4 === 3 && value > 200).length;
  }
}, 500);
</script></body>"""
"""Put in place of `</body>`, it notes at each canvas how many of its pixels are drawn."""
