"""Decisions are numbered: one number, one page."""

from collections import Counter
from pathlib import Path

_DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"


def test_every_decision_has_a_number_of_its_own():
    numbers = Counter(
        page.name.split("-", 1)[0] for page in _DECISIONS.glob("*.md") if page.name[0].isdigit()
    )
    assert len(numbers) > 20
    assert [number for number, count in numbers.items() if count > 1] == []
