"""What a report draws and what it says."""

import html
import json
import re

import numpy as np
import pytest

from penstock.sim.report.charts import Band, Chart, Line
from penstock.sim.report.summary import summarize


def chart(ys, xs=None, **fields):
    ys = np.asarray(ys, dtype=float)
    xs = np.arange(len(ys), dtype=float) if xs is None else np.asarray(xs, dtype=float)
    return Chart("Queue", "requests", xs, [Line("one", ys)], **fields)


def ticks(svg, anchor):
    """Give the labels of the y axis ("end") or the x axis ("middle")."""
    return re.findall(rf'<text [^>]*text-anchor="{anchor}">([^<]*)</text>', svg)


@pytest.mark.parametrize(
    ("highest", "fields", "labels"),
    [
        (1, {"unit": "requests"}, ["0", "1"]),
        (7, {"unit": "requests"}, ["0", "2", "4", "6", "8"]),
        (0.0031, {"unit": "s"}, ["0", "0.001", "0.002", "0.003", "0.004"]),
        (1.0, {"unit": "%"}, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (12_000, {"unit": "tokens/s"}, ["0", "5k", "10k", "15k"]),
        (0, {}, ["0", "1"]),
    ],
)
def test_the_y_axis_has_round_labels_up_to_the_highest(highest, fields, labels):
    svg = chart([0, highest], xs=[0, 100], **fields).to_svg()
    assert [label for label in ticks(svg, "end") if " " not in label] == labels


def test_the_reading_has_every_value_of_lines_and_bands():
    shown = Chart(
        "KV", "share", np.array([0.0, 60.0]), [Line("median", np.array([0.5, np.nan]))],
        [Band("all", np.array([0.1, 0.2]), np.array([0.9, 1.0]))], unit="%",
    ).to_svg()  # fmt: skip
    data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', shown)[1]))
    assert data["at"] == ["0 s", "60 s"]
    assert {name: values for _, name, values in data["rows"]} == {
        "median": [50.0, None],
        "all, to": [90.0, 100.0],
        "all, from": [10.0, 20.0],
    }


def test_names_are_text_and_no_markup():
    svg = Chart(
        "T",
        "n",
        np.array([0.0, 1.0]),
        [Line("<b>&\"'", np.array([0.0, 1.0])), Line("two", np.array([0.0, 1.0]))],
    ).to_svg()
    assert "<b>" not in svg
    assert "&lt;b&gt;&amp;" in svg


SPREAD = {"mean": 0.5, "p50": 0.4, "p90": 0.8, "p99": None}


def report(**fields):
    return {
        "requests": 12_031, "completed": 12_000, "failed": 31, "duration_s": 100.0,
        "ttft_s": SPREAD, "itl_s": SPREAD, "e2e_s": SPREAD,
        "output_tokens_per_s": 1500.0, "goodput_rps": None, "kv_hit_ratio": 0.366, "gpu_hours": 2.0,
        "kv_hit_ratio_by_tier": {"device": 0.366, "host": None, "disk": None, "object": None},
        "roles": {}, "kv_transfer": None, "scaling": None,
        "tokens_per_joule": 0.5, "usd_per_million_tokens": 3.0,
        "tenants": {},
        "wall": {"seconds": 1.5, "requests_per_s": 8000.0, "peak_rss_bytes": 250_000_000},
    } | fields  # fmt: skip


def rows(*reports):
    return {row.name: row for row in summarize(reports)}


@pytest.mark.parametrize(
    ("name", "unit", "value"),
    [
        ("requests", "", "12,031"),
        ("duration", "s", "100"),
        ("TTFT, mean", "ms", "500"),
        ("TTFT, p99", "ms", "-"),
        ("output", "tokens/s", "1,500"),
        ("goodput", "requests/s", "-"),
        ("KV hit ratio", "%", "36.6"),
        ("cost", "USD/1M tokens", "3"),
        ("peak memory", "MB", "250"),
    ],
)
def test_every_value_has_its_unit(name, unit, value):
    row = rows(report())[name]
    assert (row.unit, row.cells[0].value) == (unit, value)
    assert not row.cells[0].is_best
    assert row.cells[0].difference == ""


def test_beside_others_the_best_is_marked_and_differences_are_shown():
    slow = report(
        ttft_s=SPREAD | {"mean": 1.5},
        output_tokens_per_s=1800.0,
        kv_hit_ratio=None,
        usd_per_million_tokens=1.5,
    )
    found = rows(report(), slow)
    assert [(c.value, c.difference, c.is_best) for c in found["TTFT, mean"].cells] == [
        ("0.5", "", True),
        ("1.5", "+200 %", False),
    ]
    assert [found[f"TTFT, {part}"].unit for part in ("mean", "p50", "p90")] == ["s", "s", "s"]
    assert found["TPOT, mean"].unit == "ms"
    assert [(c.difference, c.is_best) for c in found["output"].cells] == [("", False), ("+20 %", True)]
    assert [(c.difference, c.is_best) for c in found["cost"].cells] == [("", False), ("-50 %", True)]
    assert [(c.value, c.difference) for c in found["KV hit ratio"].cells] == [("36.6", ""), ("-", "")]
