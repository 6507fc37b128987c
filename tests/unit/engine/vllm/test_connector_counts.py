"""Totals of vLLM's KV connectors, and when the log gets them."""

import pytest

from penstock.engine.vllm.connector_counts import ConnectorCounts


def test_counts_of_the_connector_alone_and_within_a_multiconnector_add_up() -> None:
    counts = ConnectorCounts()
    counts.count(None, 0.0)
    counts.count({"asked_tokens": 100, "full_blocks": 3}, 1.0)
    counts.count(
        {"CountingConnector": {"full_blocks": 2}, "NixlConnector": {"num_failed_transfers": [1]}}, 2.0
    )
    counts.count({"num_failed_transfers": [1]}, 3.0)
    assert counts.totals == {"asked_tokens": 100, "full_blocks": 5}


def test_the_log_gets_totals_at_most_twice_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    counts = ConnectorCounts()
    for second in range(61):
        counts.count({"full_blocks": 1}, 1000.0 + second)
    counts.log()
    counts.log()
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("vllm_kv_connector") == 3
