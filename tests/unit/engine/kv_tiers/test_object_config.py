"""What `kv.object` may say, and how mistakes are answered."""

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.kv_tiers import KvConfig, tier_maker
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.graph import Graph
from penstock.testing.loop import run_async


def parse(value):
    return KvConfig.parse({"object": value}, source="t").object


@pytest.mark.parametrize(
    ("text", "url", "size"),
    [
        ("s3://bucket/path:2TiB", "s3://bucket/path", "2TiB"),
        ("s3://bucket/path", "s3://bucket/path", "0"),
        ("gs://bucket:5x", "gs://bucket", "5x"),
        ("file:///mnt/kv:100GiB", "file:///mnt/kv", "100GiB"),
        ("file:///mnt/a:b", "file:///mnt/a:b", "0"),
        ("5x", "", "5x"),
        (0, "", "0"),
    ],
)
def test_a_url_and_a_size_may_be_one_text(text, url, size):
    config = parse(text)
    assert (config.url, str(config.size)) == (url, size)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("bucket/path", "a URL, or one and a size with its unit, .*got 'bucket/path'"),
        ("file:///mnt/kv:-1", "a size with its unit, .*got 'file:///mnt/kv:-1'"),
        ("s3://bucket/path:10Gb", "a size with its unit, .*got 's3://bucket/path:10Gb'"),
        ("http://host/bucket", "must begin with s3://, gs://, az://, file://"),
        ("memory://", "set kv.host instead"),
        ("s3://", "must name a bucket, as s3://bucket/path"),
        ("s3://key:word@bucket/path", "credentials go into the environment"),
        ("file://mnt/kv", "a directory from the root"),
        ({"url": "s3://b", "options": {"secret_access_key": "x"}}, "AWS_SECRET_ACCESS_KEY"),
        ({"options": {"region": "x"}}, "give its url too"),
        ({"url": "s3://b", "pack_size": "2GiB"}, "at most 1GiB"),
        ({"url": "s3://b", "pack_size": "2x"}, "must be bytes"),
        ({"url": "s3://b", "sise": "5x"}, "did you mean 'size'"),
    ],
)
def test_mistakes_are_said_with_what_was_expected(value, why):
    with pytest.raises(ConfigError, match=why):
        parse(value)


def test_a_graph_takes_the_flag_and_fields_beside_it():
    kv = {"object": {"url": "s3://bucket/kv", "options": {"endpoint": "http://host:9000"}}}
    graph = Graph.model_validate({"model": "demo", "roles": {"aggregated": {"kv": kv}}})
    assert graph.roles.aggregated.kv.object.options["endpoint"] == "http://host:9000"


@pytest.mark.parametrize("text", ["foo", "/var/cache/kv", "/var/cache/kv:-1", "", "-1"])
def test_a_disk_is_a_path_and_a_size(text):
    with pytest.raises(
        ConfigError, match=f"disk: must be a path and a size with its unit, .*100GiB, got '{text}'"
    ):
        KvConfig.parse({"disk": text}, source="t")


MEMORY = {"kv_bytes_per_block": 32}


@pytest.mark.parametrize(
    ("kv", "memory", "why"),
    [
        (
            {"object": {"url": "s3://b/kv", "options": {"regio": "x"}}},
            MEMORY,
            r"kv\.object: s3://b/kv: .*regio",
        ),
        ({"object": {"url": "s3://b/kv", "size": "1B"}}, MEMORY, r"kv\.object: 1B is less than one block"),
        ({"host": "1GiB"}, {}, r"mock\.kv_bytes_per_block"),
        ({"disk": "5x"}, MEMORY, r"disk: 5x and no path; give both"),
        ({"object": "5x"}, MEMORY, r"object: 5x and no url; give both"),
    ],
)
def test_what_only_the_store_or_the_engine_knows_is_said_at_the_start(kv, memory, why):
    shape = RunnerInfo(num_blocks=8, block_size=4, context_length=32, vocab_size=500, **memory)

    async def main():
        engine = mock_engine(shape, MockConfig(), make_tiers=tier_maker(KvConfig.model_validate(kv)))
        try:
            await engine.start()
        finally:
            await engine.close()

    with pytest.raises(ConfigError, match=why):
        run_async(main())


def test_a_missing_package_is_said_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr("penstock.engine.kv_tiers.maker.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"s3://b needs obstore, .*pip install 'penstock-llm\[object\]'"):
        tier_maker(KvConfig.model_validate({"object": "s3://b"}))
