"""What a human may write, and what the error says where it is wrong."""

import pytest

from penstock.core.errors import ConfigError
from penstock.router.config import RouterConfig


def test_defaults_are_valid():
    config = RouterConfig()
    assert config.policy == "kv"
    assert config.migrations.stalled_s_max == 60


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"policy": "round-robbin"},
            "graph.yaml: policy: 'round-robbin' is unknown; did you mean 'round-robin'?",
        ),
        ({"retries": {"burst": 0}}, "graph.yaml: retries.burst: must be >= 1, got 0"),
        ({"polcy": "kv"}, "graph.yaml: polcy: unknown key; did you mean 'policy'?"),
        ({"retries": {"migrations_max": 1}}, "graph.yaml: retries.migrations_max: unknown key"),
        ({"migrations": {"spread_s": -1}}, "graph.yaml: migrations.spread_s: must be >= 0.0, got -1"),
    ],
)
def test_mistakes_are_named(data, message):
    with pytest.raises(ConfigError) as caught:
        RouterConfig.parse(data, source="graph.yaml")
    assert message in str(caught.value)
