"""What sessions and a host tier bring agents that call tools."""

from collections.abc import Iterator

from tables.read import of, report, table

_CASES = {"plain": "neither", "sessions": "sessions", "host": "host tier", "both": "both"}
_REPORT = "kv_agents"


def agents() -> Iterator[str]:
    """Agents' TTFT and cached share by rate, and the GPU-hours within the target."""
    config = report(_REPORT)["config"]
    rates = config.get("rates_per_s", ())

    def rows() -> Iterator[list[str]]:
        for rate in rates:
            for key, what, scale, form in (
                ("ttft_mean_s", "TTFT mean, p90 (ms)", 1e3, ",.0f"),
                ("hit_share", "cached of prompts", 100.0, ".0f"),
            ):
                row = [f"{rate:g} agents/s, {what}"]
                for case in _CASES:
                    value = of(_REPORT, f"{case} {rate:g}/s {key}", form, scale)
                    if key == "hit_share":
                        row.append(f"{value} %")
                    else:
                        row.append(f"{value}, {of(_REPORT, f'{case} {rate:g}/s ttft_p90_s', form, scale)}")
                yield row
        target = config.get("target_p90_s", 0.0)
        yield [
            f"GPU-hours for 1,000 agents, p90 within {target:g} s",
            *(of(_REPORT, f"{case} gpu_hours_per_1000_agents", ",.1f") for case in _CASES),
        ]

    return table(["", *_CASES.values()], rows())


TABLES = {"kv-agents": agents}
