import pytest

from penstock.graph import build

NATS = "nats://10.0.0.1:4222"


def runtime(**fields):
    return build({"model": "demo", "runtime": fields}).runtime


@pytest.mark.parametrize(
    ("fields", "spans_hosts"),
    [
        ({}, False),
        ({"hub": "tcp://10.0.0.1:7400"}, True),
        ({"join": "tcp://10.0.0.1:7400"}, True),
        ({"discovery": "etcd", "urls": ["http://etcd:2379"]}, True),
        ({"discovery": "kubernetes"}, True),
    ],
)
def test_where_processes_meet_says_whether_there_are_other_hosts(fields, spans_hosts):
    assert runtime(**fields).spans_hosts is spans_hosts


def test_leases_in_kubernetes_are_longer_unless_set():
    assert runtime(discovery="kubernetes").registry.lease_ttl_s == 15
    assert runtime(discovery="kubernetes", registry={"linger_s": 1}).registry.lease_ttl_s == 15
    assert runtime(discovery="kubernetes", registry={"lease_ttl_s": 3}).registry.lease_ttl_s == 3


def test_events_by_nats_use_their_own_urls_or_those_of_discovery():
    assert runtime(discovery="nats", urls=[NATS], events="nats").nats_urls == (NATS,)
    etcd = {"discovery": "etcd", "urls": ["http://10.0.0.1:2379"]}
    assert runtime(**etcd, events="nats", event_urls=[NATS]).nats_urls == (NATS,)
    assert runtime(events="nats", event_urls=[NATS]).nats_urls == (NATS,)
    assert runtime().nats_urls == ()
