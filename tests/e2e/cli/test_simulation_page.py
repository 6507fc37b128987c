"""The simulator's page in a real browser without a network: it draws its charts, reads them out, and asks nobody."""

import re
from pathlib import Path

import pytest
from offline_browser import COUNT_INK, Charts, show

from penstock.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium")]

GRAPHS = Path(__file__).parents[3] / "examples" / "graphs"
SPEC = """
requests: 200
rate_per_s: 20
input_tokens: 900
output_tokens: 80
length_sigma: 0.6
turns: 2
think_s: 3
shared_prefix_tokens: 512
prefix_groups: 4
"""
POINT_AT_ALL = """<script>
setTimeout(() => {
  for (const over of document.querySelectorAll(".u-over")) {
    const box = over.getBoundingClientRect();
    const place = {clientX: box.left + box.width / 2, clientY: box.top + 50, bubbles: true};
    for (const kind of ["mouseenter", "mousemove"]) over.dispatchEvent(new MouseEvent(kind, place));
  }
}, 500);
</script></body>"""


def written(tmp_path, *arguments):
    spec, page = tmp_path / "chat.yaml", tmp_path / "report.html"
    spec.write_text(SPEC)
    assert main(["simulate", str(spec), *map(str, arguments), "--html", str(page)]) == 0
    return page


@pytest.mark.parametrize(
    ("arguments", "num_charts"),
    [
        pytest.param(
            ["--graph", GRAPHS / "8b-h100-x8.yaml", "--set", "roles.aggregated.replicas=30"],
            10,
            marks=pytest.mark.nightly,
        ),
        (["--compare", GRAPHS / "8b-h100-x8.yaml", GRAPHS / "70b-h100-tp4-x4.yaml"], 10 + 2 * 4),
    ],
    ids=["many workers", "compared"],
)
def test_a_browser_without_a_network_draws_every_chart(tmp_path, arguments, num_charts):
    page = written(tmp_path, *arguments)
    page.write_text(page.read_text().replace("</body>", COUNT_INK))
    shown = show(page)
    assert shown.console == []
    assert shown.asked == []
    inks = Charts(shown.dom).inks
    assert len(inks) == num_charts
    assert min(inks) >= 500, inks


def test_the_pointer_reads_every_chart(tmp_path):
    page = written(tmp_path, "--graph", GRAPHS / "8b-h100-x8.yaml")
    page.write_text(page.read_text().replace("</body>", COUNT_INK.replace("</body>", POINT_AT_ALL)))
    shown = show(page)
    assert shown.console == []
    readings = Charts(shown.dom).readings
    assert len(readings) == 10
    assert all("worker-0" in text and "worker-7" in text for text in readings[:4]), readings
    assert re.search(r"p50:?[\d.]+ s", readings[7]), readings


def test_a_page_that_asks_or_fails_would_be_noticed(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<!doctype html><img src="http://example.com/x.png"><script>missing()</script>')
    shown = show(page)
    assert len(shown.asked) == 1
    assert "missing is not defined" in shown.console[0]
