import pytest

from penstock.core.errors import ConfigError
from penstock.graph import Graph, build


def runtime(**fields):
    return build({"model": "demo", "runtime": fields}).runtime


def test_by_default_all_is_on_one_host():
    assert not runtime().spans_hosts


@pytest.mark.parametrize("place", ["hub", "join"])
def test_a_hub_and_a_host_that_joins_span_hosts(place):
    assert runtime(**{place: "tcp://10.0.0.1:7400"}).spans_hosts


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"hub": "tcp://10.0.0.1:0"}, "runtime.hub: must name a port"),
        ({"hub": "10.0.0.1:7400"}, "expected tcp://HOST:PORT"),
        ({"hub": "unix:///run/hub"}, "must be tcp://HOST:PORT"),
        ({"listen": "http://10.0.0.1:80"}, "expected tcp://HOST:PORT"),
        ({"hub": "tcp://a:1", "join": "tcp://b:1"}, "hub tcp://a:1 and join tcp://b:1; leave one out"),
        ({"advertise": "10.0.0.5"}, "set listen: tcp://0.0.0.0:0"),
        ({"listen": "tcp://0.0.0.0:0", "advertise": "tcp://10.0.0.5:1"}, "without a port"),
        ({"ports": "7500-7600"}, "no effect without listen"),
        ({"listen": "tcp://0.0.0.0:0", "ports": "7500"}, "must be FIRST-LAST"),
        ({"listen": "tcp://0.0.0.0:0", "ports": "7600-7500"}, "must be FIRST-LAST"),
        ({"listen": "tcp://0.0.0.0:0", "ports": "7500-70000"}, "must be FIRST-LAST"),
        ({"listen": "tcp://10.0.0.1:9", "ports": "7500-7600"}, "leave the port 0"),
        ({"tls": {"certificate": "c", "key": "k"}}, "runtime.tls.authority: missing"),
        ({"tls": {"certificate": "c", "key": "", "authority": "a"}}, "must name a PEM file"),
        ({"discovery": "etcd"}, r"etcd needs urls, such as \[http"),
        ({"urls": ["http://etcd:2379"]}, "no effect with discovery local"),
        ({"discovery": "etcd", "urls": ["etcd:2379"]}, "must be http://HOST:PORT, https"),
        ({"discovery": "etcd", "urls": ["http://etcd"], "hub": "tcp://a:1"}, "leave them out"),
        ({"discovery": "kubernetes", "urls": ["http://api"]}, "no effect with discovery kubernetes"),
        ({"discovery": "kubernetes", "hub": "tcp://a:1"}, "leave them out"),
        ({"discovery": "consul"}, "must be one of 'local'"),
        ({"registry_credentials_file": "account"}, "no effect without urls"),
        (
            {"discovery": "nats", "urls": ["nats://nats"], "event_credentials_file": "account"},
            "registry_credentials_file counts for discovery nats",
        ),
        ({"namespace": "a/b"}, "must be up to 63 letters"),
        ({"joins": "tcp://10.0.0.1:1"}, "did you mean 'join'"),
    ],
)
def test_what_cannot_be_is_refused(fields, error):
    with pytest.raises(ConfigError, match=error):
        runtime(**fields)


@pytest.mark.parametrize(
    "urls",
    [
        ["nats://penstock:hidden@nats:4222"],
        ["nats://hidden@nats"],
        "nats://u:hidden@nats",
        ["nats://u:hidden@[nats"],
    ],
)
def test_urls_have_no_accounts_and_the_refusal_shows_none(urls):
    wrong = {"discovery": "nats", "urls": urls}, {"events": "nats", "event_urls": urls}
    for fields, place in zip(wrong, ("REGISTRY", "EVENT"), strict=True):
        with pytest.raises(ConfigError, match=f"user or password.* PENSTOCK_{place}_CREDENTIALS") as refused:
            runtime(**fields)
        assert "hidden" not in refused.value.message


def test_a_registry_of_another_maker_spans_hosts():
    assert runtime(discovery="etcd", urls=["http://etcd:2379"]).spans_hosts


def test_leases_in_kubernetes_are_longer_unless_set():
    assert runtime(discovery="kubernetes").registry.lease_ttl_s == 15
    assert runtime(discovery="kubernetes", registry={"linger_s": 1}).registry.lease_ttl_s == 15
    assert runtime(discovery="kubernetes", registry={"lease_ttl_s": 3}).registry.lease_ttl_s == 3
    assert runtime(discovery="kubernetes").spans_hosts


@pytest.mark.parametrize(
    ("planner", "runtime", "problem"),
    [
        ({}, {"hub": "tcp://10.0.0.1:7400"}, "planner.address: runtime spans several hosts"),
        ({"address": "tcp://10.0.0.1:7410"}, {}, "planner.address: tcp://10.0.0.1:7410: all is on one host"),
        ({"address": "tcp://10.0.0.1:0"}, {}, "planner.address: must be tcp://HOST:PORT with a port"),
        ({"address": "unix:///run/planner"}, {}, "planner.address: must be tcp://HOST:PORT with a port"),
        ({"address": "10.0.0.1"}, {}, "planner.address: "),
        (
            {"address": "tcp://10.0.0.1:7400"},
            {"hub": "tcp://10.0.0.1:7400"},
            "planner.address: tcp://10.0.0.1:7400 is runtime.hub too",
        ),
        (
            {"address": "tcp://10.0.0.1:7400"},
            {"join": "tcp://10.0.0.1:7400"},
            "planner.address: tcp://10.0.0.1:7400 is runtime.join too",
        ),
    ],
)
def test_a_planner_of_many_hosts_says_where_it_listens_and_no_other_one(planner, runtime, problem):
    with pytest.raises(ConfigError) as caught:
        Graph.parse({"model": "demo", "planner": planner, "runtime": runtime}, source="graph")
    assert problem in caught.value.message
