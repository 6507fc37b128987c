"""`runtime.events` of a graph, and what is wrong with it."""

import pytest

from penstock.core.errors import ConfigError
from penstock.graph.runtime import RuntimeSpec

NATS = "nats://10.0.0.1:4222"


def test_events_by_nats_use_their_own_urls_or_those_of_discovery():
    assert RuntimeSpec.model_validate({"discovery": "nats", "urls": [NATS], "events": "nats"}).nats_urls == (
        NATS,
    )
    etcd = {"discovery": "etcd", "urls": ["http://10.0.0.1:2379"], "events": "nats", "event_urls": [NATS]}
    assert RuntimeSpec.model_validate(etcd).nats_urls == (NATS,)
    assert RuntimeSpec.model_validate({"events": "nats", "event_urls": [NATS]}).nats_urls == (NATS,)
    assert RuntimeSpec().nats_urls == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"events": "nats"}, "needs event_urls"),
        ({"event_urls": [NATS]}, "has no effect with events direct"),
        ({"events": "nats", "event_urls": ["http://10.0.0.1:2379"]}, "has event_urls such as nats"),
        ({"events": "nats", "event_urls": ["10.0.0.1:4222"]}, "must be http"),
    ],
)
def test_what_cannot_be_is_said(wrong, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        RuntimeSpec.model_validate(wrong)
