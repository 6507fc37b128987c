"""KV tiers of engine vllm without vLLM: its configuration, the names of blocks, and what the worker hears."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.core.hashing import block_hashes
from penstock.core.types.events import BlockStored, Holder, Tier
from penstock.core.types.instances import KvHolder, ModelCard
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import pack_hashes
from penstock.engine.kv_tiers import KvConfig
from penstock.engine.launch import SymbolicHost, ThisHost
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.launch import engine_launch
from penstock.engine.vllm.tiers.prompts import PromptHashes, StepTokens
from penstock.engine.vllm.tiers.settings import HASH_KEY, TierSettings, with_tiers
from penstock.engine.vllm.tiers.stats import TierStats, pack_stats
from penstock.kv.host_arena import HostPart

KEY = bytes(range(16))
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def spec_of(kv: dict[str, str], **fields: Any) -> EngineSpec:
    return EngineSpec(
        **{"model": "m", "block_size": 32, "kv": KvConfig.model_validate(kv), "hash_key": KEY} | fields
    )


def config_of(spec: EngineSpec) -> dict[str, Any]:
    config: dict[str, Any] = dict(with_tiers(spec, ThisHost()).args["kv_transfer_config"])
    return config


def test_settings_reach_vllms_processes_but_for_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of({"host": "5x"}, index=3)
    config = config_of(spec)
    assert config["kv_connector"] == "PenstockConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert KEY.hex() not in str(config)
    monkeypatch.setenv(HASH_KEY, KEY.hex())
    read = TierSettings.read(config["kv_connector_extra_config"])
    assert read == TierSettings(spec.kv, "aggregated.3", "", KEY)


def test_workers_divide_the_hosts_bytes_and_get_their_extents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"weights")
    part = HostPart(path="/proc/1/fd/5", number=1, extents=((0, 4096), (4096, 4096)), sharing=2)
    spec = spec_of({"host": "8GiB"}, host_part=part, model=str(tmp_path))
    monkeypatch.setenv(HASH_KEY, KEY.hex())
    read = TierSettings.read(config_of(spec)["kv_connector_extra_config"])
    assert str(read.kv.host) == "4GiB"
    assert read.host_part == part
    stamps = {read.model_stamp}
    (tmp_path / "weights.safetensors").write_bytes(b"other weights")
    stamps.add(config_of(spec)["kv_connector_extra_config"]["model_stamp"])
    assert len(stamps) == 2, "KV of other weights is not shared"


def test_connectors_that_are_there_come_first() -> None:
    alone = config_of(spec_of({"host": "1GiB"}, args={"kv_transfer_config": NIXL}))
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": [NIXL], "other": 1},
    }
    among = config_of(spec_of({"host": "1GiB"}, args={"kv_transfer_config": multi}))
    for config, policy in ((alone, "recompute"), (among, "fail")):
        assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("MultiConnector", policy)
        children = config["kv_connector_extra_config"]["connectors"]
        assert [each["kv_connector"] for each in children] == ["NixlConnector", "PenstockConnector"]
    assert among["kv_connector_extra_config"]["other"] == 1
    assert multi["kv_connector_extra_config"] == {"connectors": [NIXL], "other": 1}, "not changed"


def test_a_disk_is_of_these_weights_and_adapters(tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(b"weights")
    (adapter / "adapter_config.json").write_text("{}")

    def digest(*adapters: str) -> str:
        fields = {"args": {"lora_modules": {"sql": str(adapter)}}, "adapters": adapters}
        extra = config_of(spec_of({"disk": f"{tmp_path}/kv:1MiB"}, model=str(model), **fields))
        return str(extra["kv_connector_extra_config"]["model_digest"])

    alone, adapted = digest(), digest("sql")
    assert alone != adapted
    assert digest() == alone
    (adapter / "weights.safetensors").write_bytes(b"others!")
    assert digest("sql") != adapted
    with pytest.raises(ConfigError, match=r"there is no \*.safetensors or \*.bin"):
        with_tiers(spec_of({"disk": f"{tmp_path}/kv:1MiB"}, model="org/on-the-hub"), ThisHost())


def test_a_description_reads_no_weights_and_tells_no_key() -> None:
    spec = spec_of({"host": "1GiB", "disk": "/kv:1MiB"}, model="org/on-the-hub")
    described = engine_launch(spec, SymbolicHost())
    extra = described.arguments["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["model_digest"] == "<digest of the weights>"
    assert described.environment[HASH_KEY] == "<the deployment's hash key>"


@pytest.mark.parametrize(
    ("kv", "args", "why"),
    [
        ({"disk": ":1GiB"}, {}, "kv.disk: 1GiB and no path"),
        ({"host": "1GiB"}, {"enable_prefix_caching": False}, "tiers keep blocks of vLLM's prefix cache"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_read(kv: Any, args: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        VllmEngine(spec_of(kv, args=args))


def request(tokens: list[int], **fields: Any) -> Any:
    own = {
        "request_id": "r",
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**own | fields, all_token_ids=tokens, num_tokens=len(tokens))


def test_adapters_and_salts_never_share_a_block() -> None:
    tokens = list(range(64))
    card = ModelCard(name="m", context_length=64, block_size=32, salt=b"rev1")
    lora = SimpleNamespace(lora_name="sql")
    names = set()
    for fields in (
        {},
        {"cache_salt": b"a".hex()},
        {"cache_salt": b"b".hex()},
        {"lora_request": lora},
        {"lora_request": SimpleNamespace(lora_name="sq")},
        {"cache_salt": b"a".hex(), "lora_request": lora},
    ):
        found = PromptHashes(32, KEY).of(request(tokens, **fields))
        assert found is not None
        names.add(tuple(found[0].tolist()))
    assert len(names) == 6
    salt = card.adapted("sql").salt
    routed = PromptHashes(32, KEY).of(request(tokens, cache_salt=salt.hex(), lora_request=lora))
    assert routed is not None
    assert routed.tolist() == block_hashes(tokens, 32, salt, key=KEY).tolist(), "as routers name it"


@pytest.mark.parametrize("fields", [{"mm_features": [1]}, {"prompt_embeds": 1}])
def test_prompts_of_more_than_tokens_are_left_alone(fields: Any) -> None:
    assert PromptHashes(32, KEY).of(request(list(range(64)), **fields)) is None


def test_the_worker_hears_counts_and_events_alone_and_within_a_multiconnector() -> None:
    stored = BlockStored(block_hashes=pack_hashes([1]), parent_block_hash=None, block_size=32, tier=Tier.HOST)
    stats = TierStats()
    assert stats.read(None) == ()
    assert stats.read({"NixlConnector": {"x": 1}}) == ()
    assert stats.hit_tokens == ()
    host = KvTierCounts(tier=Tier.HOST, total_blocks=4, block_bytes=10, hit_tokens=64)
    assert stats.read(pack_stats([host], [stored])) == [stored]
    assert stats.counts == (host,)
    assert stats.read({"PenstockConnector": pack_stats([host], []), "NixlConnector": {}}) == []
    assert stats.counts == (host,)
    assert stats.hit_tokens == (64, 0, 0)
    assert (stats.holders, stats.own_blocks) == ((), 4)
    holder = KvHolder(kind=Holder.HOST, id="arena", blocks=8)
    stats.read(pack_stats([host], [], [holder]))
    assert (stats.holders, stats.own_blocks) == ((holder,), 0)


def test_drafted_tokens_are_no_prompt_and_the_rest_of_a_prompt_is_no_decode_row() -> None:
    rows = {
        "new": (9, 0, 0),
        "rest": (1, 8, 0),
        "again": (30, 0, 5),
        "decodes": (1, 70, 6),
        "drafts": (4, 90, 7),
    }
    begun = {name: row for name, row in rows.items() if name != "new"}
    output = SimpleNamespace(
        num_scheduled_tokens={name: tokens for name, (tokens, _, _) in rows.items()},
        total_num_scheduled_tokens=45,
        scheduled_spec_decode_tokens={"drafts": [1, 2, 3]},
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(begun),
            num_computed_tokens=[computed for _, computed, _ in begun.values()],
            num_output_tokens=[generated for _, _, generated in begun.values()],
        ),
    )
    assert StepTokens.of(output) == (40, 5, 160)
