import re

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.registry import create_engine, engine_names
from penstock.engine.spec import EngineSpec

SPEC = EngineSpec(model="/nowhere", block_size=16, context_length=1000)


def test_an_unknown_engine_is_named_with_the_nearest():
    assert engine_names() == ("mock", "paged", "openai", "vllm", "sglang", "trtllm")
    with pytest.raises(ConfigError, match=re.escape("engine: there is no 'page'; did you mean 'paged'?")):
        create_engine("page", SPEC)
    with pytest.raises(ConfigError, match="known: mock, openai, paged, sglang, trtllm, vllm"):
        create_engine("warp", SPEC)


@pytest.mark.engine
def test_a_wrong_setting_of_the_paged_engine_is_a_config_error():
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="engine paged: dtype"):
        create_engine("paged", EngineSpec(model="/nowhere", block_size=16, dtype="int3"))
