"""Decisions are numbered, one page each, and listed."""

import re
from collections import Counter
from pathlib import Path

import pytest

_DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"
_RECORDS = sorted(page for page in _DECISIONS.glob("*.md") if page.name[0].isdigit())
_NOTES = sorted((_DECISIONS.parents[1] / "benchmarks" / "notes").glob("*.md"))
_LINES_MAX, _COLUMNS_MAX = 50, 125


def test_every_decision_has_a_number_of_its_own():
    numbers = Counter(page.name.split("-", 1)[0] for page in _RECORDS)
    assert len(numbers) > 20
    assert [number for number, count in numbers.items() if count > 1] == []


@pytest.mark.parametrize("page", _RECORDS, ids=lambda page: page.name)
def test_a_decision_is_one_page_of_context_choice_and_price(page: Path):
    """Tables of experiments go to benchmarks/notes."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= _LINES_MAX
    assert [line for line in lines if len(line) > _COLUMNS_MAX] == []
    assert {"## Context", "## Choice", "## Price"} <= set(lines)


def test_the_index_lists_every_decision_by_its_title():
    listed = re.findall(r"(?m)^\| \[(\d{4})\]\((.*?)\) \| (.*?) \|", (_DECISIONS / "README.md").read_text())
    titles = [(page.name[:4], page.name, page.read_text().split("\n", 1)[0][7:]) for page in _RECORDS]
    assert listed == titles


def test_every_note_is_linked_from_a_decision_or_a_page():
    pages = [*_RECORDS, *_DECISIONS.parent.glob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert [note.name for note in _NOTES if not any(f"notes/{note.name}" in text for text in texts)] == []
