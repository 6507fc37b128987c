import importlib.util
import re

import msgspec
import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine import registry
from penstock.engine.registry import create_engine, engine_names
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.spec import EngineSpec

SPEC = EngineSpec(model="/nowhere", block_size=16, context_length=1000)


async def test_a_mock_engine_takes_the_models_shape():
    scheduler, other = SchedulerConfig(max_batch_tokens=99), SchedulerConfig(max_batch_tokens=300)
    spec = EngineSpec(
        model="",
        block_size=16,
        context_length=320,
        kv_blocks=8,
        scheduler=scheduler,
        schedulers={Role.PREFILL: other},
    )
    engine = create_engine("mock", spec)
    info = await engine.start()
    assert (info.block_size, info.total_blocks, info.context_length, info.max_batch_tokens) == (
        16,
        8,
        128,
        99,
    )
    assert engine.assume(Role.PREFILL) == msgspec.structs.replace(info, max_batch_tokens=300)
    assert engine.assume(Role.DECODE) == info
    await engine.close()


def test_an_unknown_engine_is_named_with_the_nearest():
    assert engine_names() == ("mock", "paged", "openai", "vllm", "sglang", "trtllm")
    with pytest.raises(ConfigError, match=re.escape("engine: there is no 'page'; did you mean 'paged'?")):
        create_engine("page", SPEC)
    with pytest.raises(ConfigError, match="known: mock, openai, paged, sglang, trtllm, vllm"):
        create_engine("warp", SPEC)


def test_without_torch_the_paged_engine_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(
        ConfigError, match=re.escape("torch not installed; run `pip install penstock-llm[engine]`")
    ):
        create_engine("paged", SPEC)


@pytest.mark.engine
def test_a_wrong_setting_of_the_paged_engine_is_a_config_error():
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="engine paged: dtype"):
        create_engine("paged", EngineSpec(model="/nowhere", block_size=16, dtype="int3"))
