"""What an engine is made of: a graph, a role and a checkpoint."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.engine.registry import create_engine
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.graph import Graph, RoleSpec

CHECKPOINT = Checkpoint.open(str(MODEL_DIR))


def spec_of(role, *, roles=None, context_length=None, **options):
    """Give the spec of a role, or of one of these roles by its name."""
    graph = Graph.model_validate(
        {"model": "m", "roles": roles or {"aggregated": {}}, "context_length": context_length}
    )
    of = role if isinstance(role, RoleSpec) else getattr(graph.roles, role)
    return engine_spec(graph, of, CHECKPOINT, **options)


def test_tiers_that_an_engine_lacks_are_refused():
    role = RoleSpec(engine="openai", engine_args={"url": "http://127.0.0.1:1"}, kv={"host": "2x"})
    with pytest.raises(ConfigError, match="no KV tiers below its device, got host"):
        create_engine("openai", spec_of(role))
    assert spec_of(RoleSpec(engine="mock")).kv_blocks is None


def test_the_context_is_the_models_unless_the_graph_asks_for_less():
    role, own = RoleSpec(engine="mock"), CHECKPOINT.context_length
    served = {asked: spec_of(role, context_length=asked).context_length for asked in (None, own, 100)}
    assert served == {None: own, own: own, 100: 100}
    said = f"^context_length: must be <= {own}, the model's own, got {own + 1}"
    with pytest.raises(ConfigError, match=said):
        spec_of(role, context_length=own + 1)


def test_limits_are_each_ranks_and_each_roles():
    limits = {"engine": "mock", "max_running_requests": 7, "max_waiting_requests": 9}
    decode = limits | {"data_parallel": 4, "max_batch_tokens": 32, "prompt_order": "fcfs"}
    spec = spec_of("decode", roles={"prefill": limits | {"max_batch_tokens": 99}, "decode": decode})
    one, four = spec.schedulers[Role.PREFILL], spec.schedulers[Role.DECODE]
    assert spec.scheduler == four
    assert (one.max_batch_tokens, one.prompt_budget, one.max_running_requests) == (99, 99, 7)
    assert (four.max_batch_tokens, four.prompt_budget, four.max_running_requests) == (128, 32, 28)
    assert (one.max_waiting_requests, four.max_waiting_requests) == (9, 9)
    assert [one.is_shortest_first(Role.PREFILL), four.is_shortest_first(Role.PREFILL)] == [True, False]


def test_a_prefill_workers_steps_are_those_that_keep_its_engine_busy():
    spec = spec_of("prefill", roles={"prefill": {"engine": "mock"}, "decode": {"engine": "mock"}})
    sizes = {role: config.max_batch_tokens for role, config in spec.schedulers.items()}
    assert sizes == {Role.PREFILL: 2048, Role.DECODE: SchedulerConfig().max_batch_tokens}
    assert spec.scheduler.max_batch_tokens == 2048, "as it is made, not only once it changes roles"


def test_engines_on_cpus_keep_to_the_core_they_are_given():
    mock, on_gpu = RoleSpec(engine="mock"), RoleSpec(engine="mock", hardware="h100")
    assert spec_of(mock, device_index=1, core=5).device == "cpu:5"
    assert spec_of(mock, device_index=1).device == "cpu"
    assert spec_of(on_gpu, device_index=1).device == "cuda:1"
