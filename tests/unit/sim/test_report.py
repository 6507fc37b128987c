"""What a report draws and what it says."""

import html
import json
import re

import numpy as np
import pytest

from penstock.sim.charts import Band, Chart, ChartLine, Dots, same_scale
from penstock.sim.report import summarize


def chart(ys, xs=None, **fields):
    ys = np.asarray(ys, dtype=float)
    xs = np.arange(len(ys), dtype=float) if xs is None else np.asarray(xs, dtype=float)
    return Chart("Queue", "requests", xs, [ChartLine("one", ys)], **fields)


def test_the_description_has_every_value_of_lines_bands_and_dots():
    shown = Chart(
        "KV", "share", np.array([0.0, 60.0]), [ChartLine("median", np.array([0.5, np.nan]), 3)],
        [Band("all", np.array([0.1, 0.2]), np.array([0.9, 1.0]))], unit="%",
        dots=[Dots(np.array([30.0, 60.0]), np.array([0.4, 0.6]), 3)], mark_s=40.0,
    ).describe()  # fmt: skip
    assert shown["xs"] == [0.0, 30.0, 60.0, 60.0]
    assert [(each["kind"], each["name"], each["colour"], each["ys"]) for each in shown["series"]] == [
        ("band", "all, to", 0, [90.0, None, 100.0, None]),
        ("band", "all, from", 0, [10.0, None, 20.0, None]),
        ("line", "median", 3, [50.0, None, None, None]),
        ("dots", "", 3, [None, 40.0, None, 60.0]),
    ]
    assert (shown["unit"], shown["x_axis"], shown["mark_s"], shown["y_max"]) == ("%", "time", 40.0, 100.0)


def test_charts_of_one_quantity_have_equal_axes():
    low, high = chart([0, 1], xs=[0, 50]), chart([0, 7], xs=[0, 20])
    scaled = [each.describe() for each in same_scale([low, high])]
    assert [(each["x_max"], each["y_max"]) for each in scaled] == [(50.0, 7.0)] * 2


def test_names_are_text_and_no_markup():
    figure = Chart("T<i>", "n", np.array([0.0, 1.0]), [ChartLine("<b>&\"'", np.array([0.0, 1.0]))]).to_html()
    assert "<b>" not in figure
    assert "<i>" not in figure
    described = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', figure)[1]))
    assert described["series"][0]["name"] == "<b>&\"'"


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
