"""Arguments of engine `openai`, and what they make of a graph."""

import re

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.cards import ModelCard
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.events import salts_of
from penstock.engine.openai.make import make_engine
from penstock.engine.spec import EngineSpec
from penstock.frontend.requests.encoding import request_salt
from penstock.graph import Graph


def refused(**args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.parse(args, source="engine openai")
    return caught.value.message


def test_urls_are_normalized():
    config = ServerConfig.parse({"url": ["http://a:1/", "https://b/v1", "http://c/base/v1/"]}, source="x")
    assert config.url == ("http://a:1", "https://b", "http://c/base")
    assert ServerConfig.parse({"url": "http://a:1"}, source="x").url == ("http://a:1",)


def test_mistakes_are_named():
    assert refused() == "engine openai: url: missing; name the running servers, as in --url http://host:8000"
    assert (
        refused(url=["a:8000"]) == "engine openai: url.0: must be like http://host:8000, got 'a:8000'"
        or refused(url=["a:8000"]) == "engine openai: url: must be like http://host:8000, got 'a:8000'"
    )
    assert "is named twice" in refused(url=["http://a:1", "http://a:1/v1"])
    assert "did you mean 'api'?" in refused(url="http://a:1", apii="vllm")
    assert "must be one of" in refused(url="http://a:1", api="tgi")


def test_a_key_file_must_have_a_key(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for name, why in (("missing", "No such file"), ("empty", "the first line is empty")):
        config = ServerConfig(url=("http://a:1",), api_key_file=str(tmp_path / name))
        with pytest.raises(ConfigError, match=re.escape(why)):
            config.api_key()


def test_each_url_is_a_worker():
    role = {"engine": {"name": "openai", "args": {"url": ["http://a:1", "http://b:1"]}}}
    graph = Graph.model_validate({"model": "demo", "roles": {"aggregated": role}})
    assert graph.roles.aggregated is not None
    assert graph.roles.aggregated.replicas == 2
    with pytest.raises(ValueError, match=r"one worker for each url, 2, got 3; leave replicas out"):
        Graph.model_validate({"model": "demo", "roles": {"aggregated": role | {"replicas": 3}}})


def test_kv_events_are_of_each_url():
    urls = ["http://a:1", "http://b:1"]
    assert "must have one for each url, 2, got 1" in refused(url=urls, kv_events="tcp://a:5557")
    assert "needs kv_events" in refused(url=urls, kv_events_replay=["tcp://a:1", "tcp://b:1"])


def test_salts_of_other_clients_prompts_are_those_of_the_card():
    card = ModelCard(name="m", context_length=64, block_size=16, salt=b"card")
    salt_of = salts_of(card, ("lora",))
    assert salt_of(None, None) == b"card"
    assert salt_of("tenant", None) == request_salt(b"card", "tenant")
    assert salt_of(None, "lora") == card.adapted("lora").salt
    assert salt_of(None, "unknown") is None


def test_a_worker_beyond_the_urls_has_no_server():
    spec = EngineSpec(model="x", block_size=16, index=1, context_length=64, args={"url": "http://a:1"})
    with pytest.raises(ConfigError, match="worker 2 has no server, as url names 1"):
        make_engine(spec)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://a:b"])
def test_addresses_that_cannot_be_are_refused(url):
    with pytest.raises(ConfigError, match="must be like http://host:8000"):
        ServerConfig.parse({"url": url}, source="test")


def test_a_key_file_is_one_line_of_text(tmp_path):
    (tmp_path / "key").write_bytes(b"a\x01b\n")
    for path, message in ((str(tmp_path / "key"), "control characters"), ("/dev/zero", "control characters")):
        with pytest.raises(ConfigError, match=message):
            ServerConfig.parse({"url": "http://a", "api_key_file": path}, source="test").api_key()
