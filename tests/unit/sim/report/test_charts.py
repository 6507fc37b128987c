import html
import json
import re

import numpy as np
import pytest

from penstock.sim.report.charts import Band, Chart, Line, say_s


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


@pytest.mark.parametrize(
    ("longest_s", "last"),
    [(100, "100 s"), (600, "10 min"), (4 * 3600, "4 h"), (5 * 86_400, "5 d"), (0.02, "0.02 s")],
)
def test_the_time_axis_has_a_unit_that_suits_its_length(longest_s, last):
    svg = chart([1, 2], xs=[0, longest_s]).to_svg()
    assert last in ticks(svg, "middle") + ticks(svg, "end")


def test_a_gap_is_not_bridged_and_nothing_leaves_the_frame():
    svg = chart([1, np.nan, 3, 4]).to_svg()
    (path,) = re.findall(r'class="line c0" d="([^"]*)"', svg)
    assert path.count("M") == 2
    assert path.count("L") == 1


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


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0, "0 s"),
        (2e-5, "20 µs"),
        (0.0123, "12.3 ms"),
        (2.0, "2 s"),
        (600, "10 min"),
        (86_400, "24 h"),
        (1e6, "11.6 d"),
    ],
)
def test_times_are_worded(value_s, text):
    assert say_s(value_s) == text
