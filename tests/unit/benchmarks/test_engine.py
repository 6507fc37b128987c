import argparse

import pytest

from benchmarks.processes import engine
from penstock.core.errors import ConfigError

pytest.importorskip("torch")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    options = parser.parse_args(arguments)
    options.quick = True
    return options


def test_a_quick_run_has_every_figure():
    report = engine.run(_options("--no-http", "--input-tokens", "12", "--output-tokens", "6"))
    assert report.problems == []
    assert set(report.figures) == {
        "generate_tokens_per_s",
        "engine_tokens_per_s_c1",
        "engine_tokens_per_s_c8",
        "engine_tokens_per_s_c32",
        "engine_speedup_c32",
        "decode_step_ms_free_blocks",
        "decode_step_ms_idle_blocks",
        "decode_step_idle_blocks_ratio",
    }
    assert all(value > 0 for value in report.figures.values())


def test_sizes_are_checked():
    with pytest.raises(ConfigError, match="--output-tokens: must be >= 1, got 0"):
        engine.run(_options("--output-tokens", "0"))
