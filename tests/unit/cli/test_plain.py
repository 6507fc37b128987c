"""`penstock top` as plain text: everything is there, numbers sort as numbers, and no name can write to the terminal."""

import pytest

from penstock.cli.top_tables import TopSnapshot, details, plain, sorted_rows, tables
from penstock.core.errors import ConfigError
from penstock.frontend.watch.snapshot import RegionRow
from tests.support import snapshots

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold]x[/bold]\r\n<b>"


def test_everything_of_a_deployment_is_said():
    said = "\n".join(plain(TopSnapshot.read(snapshots.body(alerts=(snapshots.alert("disk is slow"),)))))
    for text in (
        "penstock site tiny 3 workers",
        "warning: disk is slow",
        "7.50 requests/s   TTFT 25 ms p90 60 ms p99 200 ms   ITL 25 ms p90 60 ms p99 200 ms   queue 0   1,234 tokens/s",
        "prompt tokens: device 56%, host 11%, disk 6%, computed 28% of 27,000",
        "device ███▒▒▒▒▒···· 60%  host ▒▒·········· 10%  disk ▒▒·········· 10% off",
        "prefill-1 > decode-1",
        "prefill-1, then decode-1",
        "prefill 15.0 + itl 10.0",
        "decode-8 busy",
        "acme",
        "decode 3 to 4: demand",
    ):
        assert text in said, said


def test_an_empty_deployment_is_said_too():
    empty = {"workers": (), "models": (), "requests": (), "decisions": (), "tenants": (), "overview": None}
    seen = TopSnapshot.read(snapshots.body(**empty))
    assert list(plain(seen)) == [
        "penstock no model yet 0 workers version 0.1.0",
        "nothing needs attention",
        "queue 0",
        "prompt tokens: none yet",
    ]
    assert all(table.empty and not table.rows for table in tables(seen))


def test_workers_that_are_not_listed_are_counted():
    assert "and 197 more workers" in list(plain(TopSnapshot.read(snapshots.body(num_workers=200))))


def test_names_cannot_write_to_the_terminal():
    hostile = snapshots.worker(HOSTILE, model=HOSTILE, host=HOSTILE, problem=HOSTILE)
    seen = TopSnapshot.read(
        snapshots.body(
            workers=(hostile,),
            models=(HOSTILE,),
            requests=(snapshots.journey(HOSTILE, HOSTILE, tenant=HOSTILE, model=HOSTILE),),
            decisions=(snapshots.decision(HOSTILE, HOSTILE, prefill=HOSTILE),),
            alerts=(snapshots.alert(HOSTILE),),
        )
    )
    lines = list(plain(seen))
    lines += [text for table in tables(seen) for row in table.rows for text in details(seen, table, row.key)]
    assert any("[bold]x[/bold]" in each for each in lines)
    assert [each for each in lines if not each.isprintable()] == []


def test_numbers_sort_as_numbers_and_what_is_unknown_comes_last():
    table = tables(TopSnapshot.read(snapshots.body(workers=tuple(
        snapshots.worker(name, running=running, speed=None if running == 9 else snapshots.worker("").speed)
        for name, running in (("b", 9), ("a", 100), ("C", 20))
    ))))[0]  # fmt: skip

    def names(column, *, descending=False):
        return [row.key for row in sorted_rows(table.rows, column, descending=descending)]

    assert names(None) == ["b", "a", "C"]
    assert names(0) == ["a", "b", "C"]
    assert names(4, descending=True) == ["a", "C", "b"]
    step = table.columns.index("#step")
    assert names(step)[-1] == names(step, descending=True)[-1] == "b"


def test_details_of_a_worker_a_request_a_decision_and_a_round():
    seen = TopSnapshot.read(snapshots.body())
    found = {
        table.name: "\n".join(details(seen, table, table.rows[0].key)) for table in tables(seen) if table.rows
    }
    assert "host-a" in found["workers"]
    assert "KV from prefill-1: 4.0 MB by shm, 8.0 MB/s" in found["workers"]
    assert "KV transfer: prefill-1 to decode-1" in found["requests"]
    assert "decode-1: 25.0 ms = prefill 15.0 + itl 10.0; 12 blocks cached" in found["requests"]
    assert "40.0 ms on a prefill worker and 20.0 ms on a decode worker, against 90.0" in found["decisions"]
    assert "decode: now 3, floor 1, reaction 4, keep 2, choice 4; not fewer: itl" in found["planner"]
    assert "tokens left: -20" in found["tenants"]
    assert details(seen, tables(seen)[0], "nobody") == []


def test_another_region_is_shown_by_its_distance():
    region = RegionRow(
        name="eu", round_trip_s=0.081, frontends=2, healthy=1, advertised_chunks=3, advertised_age_s=5.0
    )
    seen = TopSnapshot.read(
        snapshots.body(workers=(snapshots.worker("eu", tiers=(), links=(), region=region),))
    )
    assert "eu 81 ms away, 1 of 2 frontends, prefixes 5.00 s ago" in "\n".join(plain(seen))
    assert "another region: eu 81 ms away, 1 of 2 frontends, prefixes 5.00 s ago" in details(
        seen, tables(seen)[0], "eu"
    )


def test_an_answer_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="not Penstock's, or another version's"):
        TopSnapshot.read(b'{"hello": 1}')
