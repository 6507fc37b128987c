"""vLLM itself takes what `penstock graph render` says that its engine core is started with, names and values."""

import json
from dataclasses import fields

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from penstock import cli
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.arguments import typed_arguments
from penstock.graph import load
from tests.support.recipes import RECIPES, roles_of

pytestmark = pytest.mark.nightly

VLLM = [path for path in RECIPES if {role.engine for _, _, role in roles_of(path)} == {"vllm"}]


@pytest.mark.parametrize("path", VLLM, ids=lambda path: path.stem)
def test_vllm_takes_what_is_rendered(path, capsys) -> None:
    assert cli.main(["graph", "render", "--json", str(path)]) == 0
    workers = json.loads(capsys.readouterr().out)["workers"]
    graph = load(path)
    for worker in workers:
        role = graph.roles.present()[worker["role"]]
        spec = EngineSpec(model=graph.model, block_size=graph.block_size, args=role.engine_args)
        engine = AsyncEngineArgs(**typed_arguments(spec, worker["arguments"], AsyncEngineArgs))
        assert engine.tensor_parallel_size == role.tensor_parallel == len(worker["devices"])
        assert engine.max_model_len == graph.context_length
        assert engine.kv_cache_dtype == role.kv_dtype
        assert engine.max_num_batched_tokens == role.max_batch_tokens
        assert engine.kv_transfer_config.kv_connector == "NixlConnector"
        assert engine.kv_transfer_config.kv_connector_extra_config == {"kv_lease_duration": 60}
        assert engine.kv_events_config.enable_kv_cache_events
        assert engine.kv_events_config.publisher == "null", "the scheduler tells them"
        for argument, value in role.engine_args.items():
            assert getattr(engine, argument) == value


def test_an_argument_that_is_left_out_is_none_by_default() -> None:
    left_out = (
        "max_model_len",
        "num_gpu_blocks_override",
        "quantization",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
    defaults = {field.name: field.default for field in fields(AsyncEngineArgs)}
    assert {defaults[name] for name in left_out} == {None}
