import pytest

from penstock.sim.report.summary import summarize

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


def test_hits_are_shown_by_tier_where_any_worker_has_several():
    by_tier = {"device": 0.3, "host": 0.066, "disk": None, "object": None}
    split = rows(report(), report(kv_hit_ratio_by_tier=by_tier))
    assert [cell.value for cell in split["of it, on host"].cells] == ["-", "6.6"]
    assert not any(name.startswith("of it") for name in rows(report(), report()))


def test_tenants_have_rows_of_their_own():
    one = {
        "requests": 9,
        "failed": 1,
        "ttft_s": SPREAD,
        "prompt_token_share": 0.25,
        "output_token_share": 0.5,
    }
    found = rows(report(tenants={"<b>": one}), report())
    assert [cell.value for cell in found["<b>: TTFT, mean"].cells] == ["500", "-"]
    assert found["<b>: TTFT, mean"].unit == "ms"
    assert found["<b>: part of prompt tokens"].cells[0].value == "25"
    assert not any(":" in name for name in rows(report()))


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


def test_what_is_equal_or_of_no_merit_is_not_marked():
    found = rows(report(), report(duration_s=50.0), report(gpu_hours=0.0))
    for name in ("completed", "duration", "TTFT, p50", "goodput", "requests"):
        assert not any(cell.is_best or cell.difference for cell in found[name].cells), name
    assert [cell.difference for cell in found["GPU time"].cells] == ["", "", "-100 %"]
    assert not any(cell.difference for cell in rows(report(failed=0), report())["failed"].cells)
