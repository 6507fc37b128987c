"""Panels of lines: each line ends at its own place, named once, with a round grid that holds all of them."""

import re

import pytest

from benchmarks.lines import Look, Panel, draw

LOOKS = {"one": Look("#111111"), "two": Look("#222222", dash=True)}


def test_a_panel_has_its_lines_level_and_names():
    lines = {"one": {1: 10.0, 10: 20.0}, "two": {1: 0.0, 10: 40.0}}
    svg = draw([Panel("a < b", lines, LOOKS, (30.0, "target"))])
    assert svg.count("<polyline") == 2
    assert svg.count("stroke-dasharray") == 2
    assert "a &lt; b" in svg
    for name in ("one", "two", "target"):
        assert svg.count(f">{name}</text>") == 1


@pytest.mark.parametrize("most", [0.03, 1.0, 7.0, 35.2, 999.0, 2185.0])
def test_grids_end_above_the_most_in_at_most_eight_steps(most):
    svg = draw([Panel("t", {"one": {1: most, 2: most / 2}}, LOOKS)])
    marks = [float(text.replace(",", "")) for text in re.findall(r'text-anchor="end">([^<]*)</text>', svg)]
    assert marks[0] == 0
    assert marks[-1] >= most * (1 - 1e-6)
    assert 2 <= len(marks) <= 9


def test_labels_do_not_cover_each_other():
    svg = draw([Panel("t", {"one": {1: 1.0, 2: 5.0}, "two": {1: 2.0, 2: 5.0}}, LOOKS)])
    ys = [float(y) for y in re.findall(r'y="([\d.]+)" style', svg)]
    assert abs(ys[0] - ys[1]) >= 13
