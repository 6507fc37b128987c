"""The simulator's page in a real browser without a network: it draws its charts, reads them out, and asks nobody."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.cli import main

pytestmark = pytest.mark.slow

GRAPHS = Path(__file__).parents[2] / "examples" / "graphs"
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
]  # fmt: skip
SPEC = """
requests: 200
rate_per_s: 20
input_tokens: 900
output_tokens: 80
spread: 0.6
turns: 2
think_s: 3
shared_prefix_tokens: 512
prefix_groups: 4
"""
POINT_AT_ALL = """<script>
for (const svg of document.querySelectorAll("svg.chart")) {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 50}));
}
</script></body>"""


@dataclass
class Shown:
    """What the browser made of a page."""

    dom: str
    console: list[str]
    asked: list[str]
    """Requests of the page itself to the network."""


def show(path):
    browser = shutil.which("chromium")
    assert browser is not None, "chromium is needed; it is among ci/packages.txt"
    offline = (
        ["unshare", "-n"]
        if subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0
        else []
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        log = Path(profile) / "net.json"
        command = [
            *offline,
            browser,
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
    """Counts each chart's points, and keeps what is read out of it."""

    def __init__(self, dom):
        super().__init__()
        self.points = []
        self.readings = []
        self._is_reading = False
        self.feed(dom)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        kinds = (attributes.get("class") or "").split()
        if tag == "svg" and "chart" in kinds:
            self.points.append(0)
        if tag == "path" and {"line", "band"} & set(kinds):
            self.points[-1] += len(set(re.findall(r"[\d.]+,[\d.]+", attributes["d"])))
        if tag == "div" and "reading" in kinds:
            self._is_reading = "hidden" not in attributes
            self.readings.append("")
        elif tag == "p" and "legend" in kinds:
            self._is_reading = False

    def handle_data(self, data):
        if self._is_reading:
            self.readings[-1] += data

    def handle_endtag(self, tag):
        if tag == "div":
            self._is_reading = False


def written(tmp_path, *arguments):
    spec, page = tmp_path / "chat.yaml", tmp_path / "report.html"
    spec.write_text(SPEC)
    assert main(["simulate", str(spec), *map(str, arguments), "--html", str(page)]) == 0
    return page


@pytest.mark.parametrize(
    ("arguments", "num_charts"),
    [
        (["--graph", GRAPHS / "8b-h100-x8.yaml"], 10),
        (["--graph", GRAPHS / "8b-h100-x8.yaml", "--set", "roles.aggregated.replicas=30"], 10),
        (["--compare", GRAPHS / "8b-h100-x8.yaml", GRAPHS / "70b-h100-tp4-x4.yaml"], 10 + 2 * 4),
    ],
    ids=["few workers", "many workers", "compared"],
)
def test_a_browser_without_a_network_draws_every_chart(tmp_path, arguments, num_charts):
    page = written(tmp_path, *arguments)
    shown = show(page)
    assert shown.console == []
    assert shown.asked == []
    points = Charts(shown.dom).points
    assert len(points) == num_charts
    assert min(points) >= 10, points


def test_the_pointer_reads_every_chart(tmp_path):
    page = written(tmp_path, "--graph", GRAPHS / "8b-h100-x8.yaml")
    page.write_text(page.read_text().replace("</body>", POINT_AT_ALL))
    shown = show(page)
    assert shown.console == []
    readings = Charts(shown.dom).readings
    assert len(readings) == 10
    assert all("worker-0" in text and "worker-7" in text for text in readings[:4]), readings
    assert re.search(r"p50[\d.]+ s", readings[7]), readings


def test_a_page_that_asks_or_fails_would_be_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<!doctype html><img src="http://example.com/x.png"><script>missing()</script>')
    shown = show(page)
    assert len(shown.asked) == 1
    assert "missing is not defined" in shown.console[0]
