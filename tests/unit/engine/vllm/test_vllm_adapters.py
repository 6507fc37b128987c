import json
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.arguments import lora_arguments, lora_paths


def adapter(path: Path, config: object) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def paths(*adapters: str, **modules: str) -> dict[str, Path]:
    return lora_paths(
        EngineSpec(
            model="m", block_size=32, adapters=adapters, args={"lora_modules": modules} if modules else {}
        )
    )


def test_vllm_gets_room_for_all_adapters_at_the_largest_rank(tmp_path: Path) -> None:
    assert lora_arguments(paths(), on_cpu=True) == {}
    small, large = (adapter(tmp_path / str(rank), {"r": rank}) for rank in (4, 20))
    found = paths("large", "small", small=small, large=large)
    assert found == {"large": Path(large), "small": Path(small)}
    assert lora_arguments(found, on_cpu=False) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    assert lora_arguments(found, on_cpu=True)["max_loras"] == 3


def test_adapters_without_a_directory_are_named(tmp_path: Path) -> None:
    good = adapter(tmp_path / "good", {"r": 8})
    with pytest.raises(ConfigError, match="adapters: 'sql' has no directory in engine_args lora_modules"):
        paths("sql")
    with pytest.raises(ConfigError, match=r"'sqll' has no directory .*did you mean 'sql'"):
        paths("sqll", sql=good)
    with pytest.raises(ConfigError, match=r"lora_modules: sql: /nowhere has no adapter_config.json"):
        paths("sql", sql="/nowhere")
    with pytest.raises(ConfigError, match="must be JSON with the rank"):
        lora_arguments(paths("odd", odd=adapter(tmp_path / "odd", {})), on_cpu=True)
    with pytest.raises(ConfigError, match="must be a mapping of names to directories"):
        lora_paths(EngineSpec(model="m", block_size=32, adapters=("a",), args={"lora_modules": "a=b"}))
