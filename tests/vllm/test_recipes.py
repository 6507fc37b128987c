"""vLLM itself has every argument that the recipes give, and takes their values."""

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from penstock.core.errors import ConfigError
from penstock.engine.vllm.launch.arguments import engine_arguments
from tests.support.recipes import RECIPES, roles_of, spec_of

ROLES = [each for path in RECIPES for each in roles_of(path) if each[2].engine == "vllm"]


@pytest.mark.parametrize("each", ROLES, ids=lambda each: f"{each[0].name}-{each[1]}")
def test_vllm_has_every_argument(each) -> None:
    graph, name, role = each
    arguments = engine_arguments(spec_of(graph, name, role), AsyncEngineArgs)
    engine = AsyncEngineArgs(**arguments)
    assert engine.tensor_parallel_size == role.tensor_parallel
    assert engine.max_model_len == graph.context_length
    assert engine.kv_cache_dtype == role.kv_dtype
    for argument, value in role.engine_args.items():
        assert getattr(engine, argument) == value


def test_there_are_some() -> None:
    assert len(ROLES) == 4


def test_a_wrong_argument_would_be_found() -> None:
    graph, name, role = ROLES[0]
    wrong = role.model_copy(update={"engine_args": {"gpu_memory_utilisation": 0.9}})
    with pytest.raises(ConfigError, match="did you mean 'gpu_memory_utilization'"):
        engine_arguments(spec_of(graph, name, wrong), AsyncEngineArgs)
