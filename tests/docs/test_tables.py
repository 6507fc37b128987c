"""The tables and pictures of the docs are what benchmarks/results say."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import docs_tables  # noqa: E402 - beside the tests, not a package

NUMBER = re.compile(r"\**-?[\d,]*\d\.\d+\**( (ms|s|us|%|million))?")
"""What a figure looks like, alone in its cell: whole numbers are also counts, ports and limits."""
NOT_MEASURED = ("configuration.md", "api.md")


@pytest.mark.parametrize("page", docs_tables.pages(), ids=lambda page: page.name)
def test_tables_are_what_the_results_say(page: Path) -> None:
    """Else run `python tools/docs_tables.py`."""
    text = page.read_text(encoding="utf-8")
    assert docs_tables.render(text) == text


@pytest.mark.parametrize("name", docs_tables.PICTURES)
def test_pictures_are_what_the_results_say(name: str) -> None:
    """Else run `python tools/docs_tables.py`."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert docs_tables.PICTURES[name]() == text


def test_every_picture_of_figures_is_drawn_from_results() -> None:
    assert sorted(path.name for path in (ROOT / "docs").glob("*.svg")) == sorted(docs_tables.PICTURES)


def test_every_table_that_is_made_stands_somewhere() -> None:
    used = [name for page in docs_tables.pages() for name in docs_tables.names_in(page.read_text())]
    assert sorted(used) == sorted(docs_tables.TABLES)


@pytest.mark.parametrize("page", docs_tables.pages(), ids=lambda page: page.name)
def test_no_table_of_figures_is_written_by_hand(page: Path) -> None:
    if page.name in NOT_MEASURED:
        return
    rest = docs_tables._TABLE.sub("", page.read_text(encoding="utf-8"))
    rows = [line.strip("|").split("|") for line in rest.splitlines() if line.startswith("|")]
    by_hand = [row for row in rows if sum(bool(NUMBER.fullmatch(cell.strip())) for cell in row) > 1]
    assert by_hand == []


def test_a_changed_figure_shows() -> None:
    text = f"before\n\n{docs_tables.make('hardware')}\n\nafter\n"
    assert docs_tables.render(text) == text
    stale = text.replace("3.35", "3.36")
    assert stale != text
    assert docs_tables.render(stale) == text
