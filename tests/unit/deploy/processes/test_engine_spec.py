import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.engine.paged.model.checkpoint import Checkpoint
from penstock.engine.registry import create_engine
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.graph import Graph, RoleSpec


def test_tiers_that_an_engine_lacks_are_refused():
    checkpoint = Checkpoint.open(str(MODEL_DIR))
    role = RoleSpec(engine="openai", engine_args={"url": "http://127.0.0.1:1"}, kv={"host": "2x"})
    spec = engine_spec(Graph(model="m"), role, checkpoint)
    with pytest.raises(ConfigError, match="no KV tiers below its device, got host"):
        create_engine("openai", spec)
    assert engine_spec(Graph(model="m"), RoleSpec(engine="mock"), checkpoint).kv_blocks is None


def test_the_context_is_the_models_unless_the_graph_asks_for_less() -> None:
    checkpoint, role = Checkpoint.open(str(MODEL_DIR)), RoleSpec(engine="mock")
    own = checkpoint.context_length
    for asked, served in ((None, own), (own, own), (100, 100)):
        assert engine_spec(Graph(model="m", context_length=asked), role, checkpoint).context_length == served
    with pytest.raises(
        ConfigError, match=f"^context_length: must be <= {own}, the model's own, got {own + 1}"
    ):
        engine_spec(Graph(model="m", context_length=own + 1), role, checkpoint)


def test_limits_are_each_ranks_and_each_roles() -> None:
    checkpoint = Checkpoint.open(str(MODEL_DIR))
    limits = {"max_running_requests": 7, "max_waiting_requests": 9}
    roles = {
        "prefill": {"engine": "mock", "max_batch_tokens": 99} | limits,
        "decode": {"engine": "mock", "data_parallel": 4, "max_batch_tokens": 32, "prompt_order": "fcfs"}
        | limits,
    }
    graph = Graph.model_validate({"model": "m", "roles": roles})
    spec = engine_spec(graph, graph.roles.decode, checkpoint)
    one, four = spec.schedulers[Role.PREFILL], spec.schedulers[Role.DECODE]
    assert spec.scheduler == four
    assert (one.max_batch_tokens, one.prompt_budget, one.max_running_requests) == (99, 99, 7)
    assert (four.max_batch_tokens, four.prompt_budget, four.max_running_requests) == (128, 32, 28)
    assert (one.max_waiting_requests, four.max_waiting_requests) == (9, 9)
    assert [one.is_shortest_first(Role.PREFILL), four.is_shortest_first(Role.PREFILL)] == [True, False]


def test_a_prefill_workers_steps_are_those_that_keep_its_engine_busy() -> None:
    checkpoint = Checkpoint.open(str(MODEL_DIR))
    roles = {"prefill": {"engine": "mock"}, "decode": {"engine": "mock"}}
    graph = Graph.model_validate({"model": "m", "roles": roles})
    spec = engine_spec(graph, graph.roles.prefill, checkpoint)
    usual = SchedulerConfig().max_batch_tokens
    sizes = {role: config.max_batch_tokens for role, config in spec.schedulers.items()}
    assert sizes == {Role.PREFILL: 2048, Role.DECODE: usual}
    assert spec.scheduler.max_batch_tokens == 2048, "as it is made, not only once it changes roles"


def test_engines_on_cpus_keep_to_the_core_they_are_given() -> None:
    checkpoint = Checkpoint.open(str(MODEL_DIR))
    roles = {"prefill": {"engine": "mock"}, "decode": {"engine": "mock", "hardware": "h100"}}
    graph = Graph.model_validate({"model": "m", "roles": roles})
    for core, device in ((5, "cpu:5"), (None, "cpu")):
        assert engine_spec(graph, graph.roles.prefill, checkpoint, device_index=1, core=core).device == device
        assert engine_spec(graph, graph.roles.decode, checkpoint, device_index=1).device == "cuda:1"
