"""vLLM's NixlConnector: the configuration and the variables of an engine that sends and receives KV."""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.launch_host import LaunchHost
from penstock.engine.spec import EngineSpec

LEASE_S = 60
"""Seconds that a prefill worker keeps blocks for a decode worker, whose vLLM renews the lease while the request waits."""
_VLLM_LEASE_S = 30
_NIXL = ("NixlConnector", "NixlPullConnector")
_CPU_CONNECTOR = "penstock.engine.vllm.nixl_connector"
_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LOOPBACK = "127.0.0.1"


def transfers_kv(spec: EngineSpec) -> bool:
    """Say whether an engine has to be able to send and receive KV: its worker has, or may change to, a role that does."""
    return bool({spec.role, *spec.schedulers} & {Role.PREFILL, Role.DECODE})


def given_config(spec: EngineSpec) -> Mapping[str, Any] | None:
    """Give the graph's `kv_transfer_config`; None where it has none.

    Raises:
        ConfigError: it is no mapping, or a connector in it is none.
    """
    given: Mapping[str, Any] | None = spec.args.get("kv_transfer_config")
    if given is None:
        return None
    for each in _connectors(given) if isinstance(given, Mapping) else [given]:
        if not isinstance(each, Mapping):
            raise ConfigError(
                f"engine_args: kv_transfer_config: must be a mapping, as {{kv_connector: NixlConnector}}, got {each!r}"
            )
    return given


def transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """Give vLLM's `kv_transfer_config`: the graph's, or one for NixlConnector that may send and receive.

    Raises:
        ConfigError: the graph's has no NixlConnector.
    """
    given = given_config(spec)
    if given is None:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",  # a worker's role may change
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return config | ({"kv_connector_module_path": _CPU_CONNECTOR} if _is_cpu(spec) else {})
    connectors = _connectors(given)
    if not any(each.get("kv_connector") in _NIXL for each in connectors):
        names = ", ".join(str(each.get("kv_connector")) for each in connectors) or "none"
        raise ConfigError(
            "engine_args: kv_transfer_config: roles prefill and decode transfer KV by NixlConnector, got connectors"
            f" {names}; add NixlConnector, by MultiConnector beside others, or leave kv_transfer_config out"
        )
    return dict(given)


def transfer_environment(spec: EngineSpec, host: LaunchHost) -> dict[str, str]:
    """Give the variables for NIXL. Variables that the user has set stay; each engine on a host gets its own ports.

    Raises:
        ConfigError: the address is none of this host, or there is no free port.
    """
    present = host.variables
    address, first = present.get(_HOST, _LOOPBACK), present.get(_PORT)
    if first is not None and not first.isdecimal():
        raise ConfigError(f"{_PORT}: must be a port number, got {first!r}")
    try:
        port, *_ = host.ports(
            "NIXL port", spec.data_parallel, address=address, first=None if first is None else int(first)
        )
    except ConfigError as error:
        raise ConfigError(f"{_HOST} and {_PORT}: {error.message}") from error
    variables = {_HOST: address, _PORT: str(port)}
    if _is_cpu(spec):
        variables["UCX_TLS"] = "self,sm,tcp"
        if address == _LOOPBACK:
            variables["UCX_NET_DEVICES"] = "lo"
    return {name: value for name, value in variables.items() if name == _PORT or name not in present}


def lease_s(config: Mapping[str, Any]) -> float:
    """Read from a `kv_transfer_config` how many seconds vLLM keeps blocks for a decode worker."""
    extra = [each.get("kv_connector_extra_config") or {} for each in (config, *_connectors(config))]
    given = (one["kv_lease_duration"] for one in extra if "kv_lease_duration" in one)
    return float(next(given, _VLLM_LEASE_S))


def _connectors(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the connectors of a `kv_transfer_config`, those of a MultiConnector singly."""
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    is_several = config.get("kv_connector") == "MultiConnector" and isinstance(children, list | tuple)
    return [*children] if is_several and children else [config]


def _is_cpu(spec: EngineSpec) -> bool:
    return spec.device.startswith("cpu")
