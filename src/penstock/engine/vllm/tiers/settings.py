"""What the worker tells the connector: vLLM's `kv_transfer_config`, and the hash key by an environment variable."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.engine.kv_tiers import KvConfig, tier_maker
from penstock.engine.launch import LaunchHost
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.arguments import given_config, lora_paths
from penstock.engine.weights_digest import weights_digest, weights_stamp
from penstock.kv.host_arena import HostPart

CONNECTOR = "PenstockConnector"
_MODULE = "penstock.engine.vllm.tiers.connector"
_MULTI = "MultiConnector"
HASH_KEY = "PENSTOCK_KV_HASH_KEY"
"""Of the environment of vLLM's processes. vLLM writes its configuration to the log, and this is a secret of the deployment."""
_OUTLIVING = {Tier.DISK, Tier.OBJECT}


@dataclasses.dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of the connector in one process of vLLM.

    Attributes:
        kv: the worker's tiers.
        worker: its name, which its file on a disk ends with.
        model_digest: of weights and adapters; empty without a tier that outlives the worker.
        hash_key: the deployment's.
        model_stamp: of weights and adapters on this machine; empty without a host tier.
        host_part: the worker's part of its host's arena; None without.
    """

    kv: KvConfig
    worker: str
    model_digest: str
    hash_key: bytes
    model_stamp: str = ""
    host_part: HostPart | None = None

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> "TierSettings":
        """Read what `with_tiers` wrote, in a process of vLLM."""
        return cls(
            KvConfig.model_validate(extra["kv"]),
            extra["worker"],
            extra["model_digest"],
            bytes.fromhex(os.environ[HASH_KEY]),
            extra["model_stamp"],
            msgspec.convert(extra["host_part"], HostPart | None),
        )


def check_tiers(spec: EngineSpec) -> None:
    """Check the tiers of a worker that is about to start.

    Raises:
        ConfigError: vLLM cannot have them.
    """
    tier_maker(spec.kv)
    if spec.args.get("enable_prefix_caching") is False:
        raise ConfigError(
            "engine_args: enable_prefix_caching: tiers keep blocks of vLLM's prefix cache; leave it on, or leave kv out"
        )


def with_tiers(spec: EngineSpec, host: LaunchHost) -> EngineSpec:
    """Add the connector to vLLM's arguments, after the connectors that are there: they come first for a request's KV.

    The host reads all weights for their digest, if a tier outlives the worker.

    Raises:
        ConfigError: the weights cannot be read.
    """
    sharing = spec.host_part.sharing if spec.host_part is not None else 1
    kv = spec.kv.model_copy(update={"host": spec.kv.host.shared_by(sharing)})
    digest, stamp = "", ""
    if spec.kv.present().keys() & _OUTLIVING:
        digest = host.read("digest of the weights", lambda: _digest(spec, weights_digest))
    if spec.host_part is not None:
        stamp = host.read("stamp of the weights", lambda: _digest(spec, weights_stamp))
    own: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": _MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "kv": kv.model_dump(mode="json"),
            "worker": f"{spec.role}.{spec.index}",
            "model_digest": digest,
            "model_stamp": stamp,
            "host_part": msgspec.to_builtins(spec.host_part),
        },
    }
    given = given_config(spec)
    config = own if given is None else _combined(given, own)
    return dataclasses.replace(spec, args={**spec.args, "kv_transfer_config": config})


def _combined(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    extra = dict(given.get("kv_connector_extra_config") or {})
    if given.get("kv_connector") == _MULTI:
        whole, children = dict(given), list(extra.get("connectors") or ())
    else:
        whole, children, extra = {"kv_connector": _MULTI}, [given], {}
    whole |= {
        "kv_role": "kv_both",
        "kv_load_failure_policy": given.get("kv_load_failure_policy", "recompute"),
        "kv_connector_extra_config": extra | {"connectors": [*children, own]},
    }
    return whole


def _digest(spec: EngineSpec, digest_of: Callable[[str], str]) -> str:
    digest = hashlib.blake2b(digest_of(spec.model).encode(), digest_size=16)
    for name, path in sorted(lora_paths(spec).items()):
        digest.update(f"{name} {digest_of(str(path))} ".encode())
    return digest.hexdigest()
