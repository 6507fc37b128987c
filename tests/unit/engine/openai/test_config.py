"""Arguments of engine `openai`, and what they make of a graph."""

import re

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import ModelCard
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.events import salts_of
from penstock.engine.openai.make import make_engine
from penstock.engine.spec import EngineSpec
from penstock.frontend.encoding import request_salt
from penstock.graph import Graph

TWO = ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "engine openai: url: missing; name the running servers, as in --url http://host:8000"),
        ({"url": ["a:8000"]}, "must be like http://host:8000, got 'a:8000'"),
        ({"url": "http://127.0.0.1:99999"}, "must be like http://host:8000"),
        ({"url": "http://[::1"}, "must be like http://host:8000"),
        ({"url": "http://a:b"}, "must be like http://host:8000"),
        ({"url": ["http://a:1/", "http://a:1/v1"]}, "is named twice"),
        ({"url": "http://a:1", "apii": "vllm"}, "did you mean 'api'?"),
        ({"url": "http://a:1", "api": "tgi"}, "must be one of"),
        ({"url": TWO, "kv_events": "tcp://a:5557"}, "must have one for each url, 2, got 1"),
        ({"url": TWO, "kv_events_replay": ["tcp://a:1", "tcp://b:1"]}, "needs kv_events"),
    ],
)
def test_mistakes_are_named(args, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        ServerConfig.parse(args, source="engine openai")


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b"\n", "the first line is empty"), (b"a\x01b\n", "control characters")],
)
def test_a_key_file_is_one_line_of_text(tmp_path, content, why):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    config = ServerConfig(url=("http://a:1",), api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match=why):
        config.api_key()


def test_each_url_is_a_worker():
    role = {"engine": {"name": "openai", "args": {"url": ["http://a:1", "http://b:1"]}}}
    graph = Graph.model_validate({"model": "demo", "roles": {"aggregated": role}})
    assert graph.roles.aggregated is not None
    assert graph.roles.aggregated.replicas == 2
    with pytest.raises(ValueError, match=r"one worker for each url, 2, got 3; leave replicas out"):
        Graph.model_validate({"model": "demo", "roles": {"aggregated": role | {"replicas": 3}}})


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
