import importlib.util
import re

import pytest

from penstock.core.errors import ConfigError
from penstock.engine import registry
from penstock.engine.registry import EngineSpec, create_engine, engine_names
from penstock.testing.loop import run_async

SPEC = EngineSpec(model="/nowhere", block_size=16, context_length=1000)


def test_a_mock_engine_takes_the_models_shape():
    async def main():
        engine = create_engine(
            "mock", EngineSpec(model="", block_size=16, context_length=320, kv_blocks=8, max_batch_tokens=99)
        )
        info = await engine.start()
        assert (info.block_size, info.total_blocks, info.context_length, info.max_batch_tokens) == (
            16,
            8,
            128,
            99,
        )
        await engine.close()

    run_async(main())


def test_limits_are_each_ranks() -> None:
    one = EngineSpec(model="", block_size=16, max_batch_tokens=99, max_running_requests=7).scheduler
    four = EngineSpec(
        model="", block_size=16, data_parallel=4, max_batch_tokens=99, max_running_requests=7
    ).scheduler
    assert (one.max_batch_tokens, one.prompt_budget, one.max_running_requests) == (99, 99, 7)
    assert (four.max_batch_tokens, four.prompt_budget, four.max_running_requests) == (396, 99, 28)


def test_an_unknown_engine_is_named_with_the_nearest():
    assert engine_names() == ("mock", "paged")
    with pytest.raises(ConfigError, match=re.escape("engine: there is no 'page'; did you mean 'paged'?")):
        create_engine("page", SPEC)
    with pytest.raises(ConfigError, match="known: mock, paged"):
        create_engine("warp", SPEC)


def test_the_mock_engine_must_be_told_a_context():
    with pytest.raises(ConfigError, match="context_length"):
        create_engine("mock", EngineSpec(model="", block_size=16))


def test_without_torch_the_paged_engine_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(
        ConfigError, match=re.escape("torch not installed; run `pip install penstock[engine]`")
    ):
        create_engine("paged", SPEC)


@pytest.mark.engine
def test_a_wrong_setting_of_the_paged_engine_is_a_config_error():
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="engine paged: dtype"):
        create_engine("paged", EngineSpec(model="/nowhere", block_size=16, dtype="int3"))
