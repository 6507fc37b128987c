"""Disaggregation of vLLM by its NixlConnector: configuration, payloads, and what becomes of requests and outputs."""

import importlib.machinery
import socket
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, KvHandle, Request, SamplingParams
from penstock.core.wire import num_tokens, pack_tokens, unpack_tokens
from penstock.engine.launch import SymbolicHost, ThisHost
from penstock.engine.registry import create_engine
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm import arguments, engine
from penstock.engine.vllm.arguments import LEASE_S, transfer_config, transfer_environment
from penstock.engine.vllm.engine import NixlVllmEngine, VllmEngine, pack_params, unpack_params
from penstock.engine.vllm.launch import engine_launch
from penstock.engine.vllm.requests import VllmRequest
from penstock.seams import NativeKvTransfer

PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": ([3, 4],), "remote_engine_id": "e",
    "remote_request_id": "r-0", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 50,
    "later": None,
}  # fmt: skip


def spec(**fields: Any) -> EngineSpec:
    return EngineSpec(**{"model": "m", "block_size": 32, "role": Role.PREFILL} | fields)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pretend that vLLM and NIXL are installed."""
    specs: dict[str, Any] = {"nixl": importlib.machinery.ModuleSpec("nixl", None)}
    monkeypatch.setattr(arguments, "version", lambda _package: "0.32.4")
    monkeypatch.setattr(engine, "find_spec", specs.get)
    return specs


def request(**fields: Any) -> Request:
    return Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens([7] * 50),
        sampling=SamplingParams(max_tokens=1),
        **fields,
    )


def output(**fields: Any) -> Any:
    stats = SimpleNamespace(num_computed_tokens=1, num_cached_tokens=49, num_external_cached_tokens=49)
    given = {"new_token_ids": [5], "finish_reason": "length", "new_logprobs": None, "events": None}
    return SimpleNamespace(**given | {"kv_transfer_params": None, "prefill_stats": stats} | fields)


class Engine(NixlVllmEngine):
    """With what `start` would find, and no vLLM."""

    def arguments_of(self, asked: Request) -> Mapping[str, Any]:
        return self._sampling_arguments(asked)

    def delta_of(self, asked: Request, said: Any) -> Any:
        return self._delta(VllmRequest.of(asked, 0.0), said)


def config_of(of: EngineSpec) -> Any:
    return engine_launch(of, SymbolicHost()).arguments["kv_transfer_config"]


def test_roles_that_a_worker_has_or_may_change_to_decide_whether_kv_can_be_transferred() -> None:
    assert isinstance(create_engine("vllm", spec()), NativeKvTransfer)
    assert isinstance(create_engine("vllm", spec(role=Role.DECODE)), NativeKvTransfer)
    both = {Role.AGGREGATED: SchedulerConfig(), Role.DECODE: SchedulerConfig()}
    assert isinstance(create_engine("vllm", spec(role=Role.AGGREGATED, schedulers=both)), NativeKvTransfer)
    alone = create_engine("vllm", spec(role=Role.AGGREGATED, schedulers={Role.AGGREGATED: SchedulerConfig()}))
    assert type(alone) is VllmEngine


def test_without_nixl_the_start_says_what_to_install(installed: dict[str, Any]) -> None:
    installed.clear()
    with pytest.raises(
        ConfigError, match="NIXL, which is not installed; run `pip install --no-deps nixl nixl-cu12`"
    ):
        create_engine("vllm", spec())
    with pytest.raises(ConfigError, match="run `pip install nixl`"):
        create_engine("vllm", spec(device="cuda:0"))


def test_the_kind_names_what_vllm_needs_to_be_equal() -> None:
    assert Engine(spec()).kv_transfer_kind() == "vllm-0.32.4-nixl-1-cpu"
    assert Engine(spec(device="cuda:1", role=Role.DECODE)).kv_transfer_kind() == "vllm-0.32.4-nixl-1-cuda"


def test_nixl_is_configured_unless_the_graph_does() -> None:
    config = transfer_config(spec())
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_both")
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_module_path"] == "penstock.engine.vllm.nixl_connector"
    assert "kv_connector_module_path" not in transfer_config(spec(device="cuda:0")), (
        "GPUs leave cores to poll"
    )
    own = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kv_lease_duration": 7},
    }
    engine = Engine(spec(args={"kv_transfer_config": own, "seed": 1}))
    assert config_of(spec(args={"kv_transfer_config": own, "seed": 1})) == own
    assert engine.delta_of(request(prefill_only=True), output(kv_transfer_params=PARAMS)).kv.ttl_s == 7
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "A"}, own]},
    }
    assert config_of(spec(args={"kv_transfer_config": several})) == several
    with pytest.raises(
        ConfigError, match="transfer KV by NixlConnector, got connectors LMCacheConnectorV1; add"
    ):
        Engine(spec(args={"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}))


def test_each_engine_gets_ports_of_its_own_and_the_users_variables_stay() -> None:
    host = ThisHost({})
    given = engine_launch(spec(sharing_engines=2), host).environment
    host.close()
    assert given["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert given["UCX_TLS"] == "self,sm,tcp"
    assert given["UCX_NET_DEVICES"] == "lo"
    with socket.create_server(("127.0.0.1", int(given["VLLM_NIXL_SIDE_CHANNEL_PORT"]))) as taken:
        port = taken.getsockname()[1]
        present = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port), "UCX_TLS": "tcp"}
        other = transfer_environment(spec(data_parallel=2), ThisHost(present))
    assert int(other["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > port, "it begins at the user's"
    assert "UCX_TLS" not in other
    everywhere = transfer_environment(spec(), ThisHost({"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"}))
    assert "UCX_NET_DEVICES" not in everywhere, "other hosts are reached by other devices"
    assert "UCX_TLS" not in transfer_environment(spec(device="cuda:0"), ThisHost({}))
    for wrong, why in (
        ({"VLLM_NIXL_SIDE_CHANNEL_HOST": "192.0.2.1"}, "192.0.2.1 is no address of this machine"),
        ({"VLLM_NIXL_SIDE_CHANNEL_PORT": "any"}, "PORT: must be a port number, got 'any'"),
        ({"VLLM_NIXL_SIDE_CHANNEL_PORT": "65535"}, "no 2 successive free TCP ports on 127.0.0.1 from 65535"),
    ):
        with pytest.raises(ConfigError, match=why):
            transfer_environment(spec(data_parallel=2), ThisHost(wrong))


def test_a_prefill_ends_with_a_handle_and_no_token_unless_the_answer_ends_with_its_first() -> None:
    engine = Engine(spec())
    asked = engine.arguments_of(request(prefill_only=True))["extra_args"]["kv_transfer_params"]
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    delta = engine.delta_of(request(prefill_only=True), output(kv_transfer_params=PARAMS))
    assert (num_tokens(delta.token_ids), delta.finish_reason) == (0, FinishReason.LENGTH)
    assert (delta.kv.num_tokens, delta.kv.ttl_s) == (50, LEASE_S)
    handed_over = PARAMS | {"remote_block_ids": [[3, 4]]}
    assert unpack_params(delta.kv.payload) == handed_over
    decode = Engine(spec(role=Role.DECODE)).arguments_of(request(kv=delta.kv))
    assert decode["extra_args"]["kv_transfer_params"] == handed_over
    for said in (output(kv_transfer_params=PARAMS, finish_reason="stop"), output()):
        delta = engine.delta_of(request(prefill_only=True), said)
        assert (unpack_tokens(delta.token_ids).tolist(), delta.kv) == ([5], None)


def test_what_is_no_payload_is_recomputed_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(spec(role=Role.DECODE))
    wrong = (
        b"", b"junk", msgspec.msgpack.encode([2, PARAMS]), pack_params(PARAMS | {"remote_port": "5600"}),
        pack_params({"remote_host": "h"}), pack_params(PARAMS | {"remote_block_ids": [3]}),
    )  # fmt: skip
    for payload in wrong:
        with pytest.raises((ValueError, msgspec.MsgspecError)):
            unpack_params(payload)
        assert "extra_args" not in engine.arguments_of(request(kv=KvHandle.native(payload, 50, 60.0)))
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("kv_handle_unreadable") == 1
