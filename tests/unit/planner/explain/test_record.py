"""A round in words."""

from penstock.deploy.commands.planner.text import paragraphs
from penstock.planner.explain.entries import Round
from penstock.planner.explain.record import DecisionRecord, Seen


def test_silent_workers_and_waits_are_told():
    record = DecisionRecord(
        number=1,
        at_s=0.0,
        seen=Seen(seconds=10.0, silent=("decode-2", "frontend-1")),
        retires=("decode-2",),
        overdue=("decode-1", "decode-2"),
        waits=("decode: 1 more wanted, tried again in 60 s, as 2 starts in a row were not done in time",),
    )
    assert record.explain() == (
        "decode-2 retires: decode-1 was not ready in time; decode-2 has been silent for too long; decode: 1 more wanted, tried"
        " again in 60 s, as 2 starts in a row were not done in time"
    )
    said = list(paragraphs(Round(time_s=0.0, record=record)))
    assert "  overdue   decode-1 was not ready in time" in said
    assert "            decode-2 has been silent for too long" in said
    assert any(line.startswith("  waits     decode: 1 more wanted") for line in said)
