"""LoRA adapters: their directories come from the engine argument `lora_modules`."""

import json
from pathlib import Path
from typing import Any

from penstock.core.config import nearest
from penstock.core.errors import ConfigError
from penstock.engine.spec import EngineSpec

LORA_MODULES = "lora_modules"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM 0.32 can be told (`vllm.config.lora.MaxLoRARanks`)."""


def lora_paths(spec: EngineSpec) -> dict[str, Path]:
    """Give the directory of each of the worker's adapters.

    Raises:
        ConfigError: an adapter has no directory, or there is no adapter in it.
    """
    modules = spec.args.get(LORA_MODULES) or {}
    if not isinstance(modules, dict) or not all(isinstance(path, str) for path in modules.values()):
        raise ConfigError(
            f"engine_args: {LORA_MODULES}: must be a mapping of names to directories, as {{sql: ./sql-lora}}, got"
            f" {modules!r}"
        )
    paths = {}
    for name in spec.adapters:
        if name not in modules:
            known = nearest(name, list(modules)) if modules else ""
            raise ConfigError(
                f"adapters: {name!r} has no directory in engine_args {LORA_MODULES}{known}; add it there"
            )
        paths[name] = Path(modules[name])
        if not (paths[name] / "adapter_config.json").is_file():
            raise ConfigError(
                f"engine_args: {LORA_MODULES}: {name}: {modules[name]} has no adapter_config.json; give a directory that"
                " PEFT has saved"
            )
    return paths


def lora_arguments(paths: dict[str, Path], *, on_cpu: bool) -> dict[str, Any]:
    """Give vLLM's arguments for these adapters: a slot for each, of the largest of their ranks.

    On CPUs vLLM 0.32 computes a request without an adapter, beside one with, by the weights in the last place
    (`vllm/lora/ops/torch_ops`: index -1). So on CPUs there is one LoRA slot more, which stays zero.
    """
    if not paths:
        return {}
    largest = max(_rank(path) for path in paths.values())
    return {
        "enable_lora": True,
        "max_loras": len(paths) + on_cpu,
        "max_lora_rank": next((rank for rank in _RANKS if rank >= largest), largest),
    }


def _rank(path: Path) -> int:
    try:
        return int(json.loads((path / "adapter_config.json").read_bytes())["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}/adapter_config.json: must be JSON with the rank `r`; {error!r}") from error
