"""Settings of KV transfers that an engine cannot follow are said, not ignored."""

import pytest
from structlog.testing import capture_logs

from penstock.demo import MODEL_DIR
from penstock.deploy.processes.engine_spec import engine_spec
from penstock.deploy.processes.worker_process import check_peers
from penstock.engine.paged.model.checkpoint import Checkpoint
from penstock.engine.registry import create_engine
from penstock.graph import Graph, RoleSpec


@pytest.mark.parametrize(
    ("engine", "peers", "warns"), [("openai", True, True), ("openai", False, False), ("mock", True, False)]
)
def test_peers_of_an_engine_that_shows_no_blocks_are_warned_of(engine, peers, warns):
    graph = Graph.model_validate({"model": "m", "worker": {"kv_transfer": {"peers": peers}}})
    args = {"engine_args": {"url": "http://127.0.0.1:1"}} if engine == "openai" else {}
    role = RoleSpec(engine=engine, **args)
    made = create_engine(engine, engine_spec(graph, role, Checkpoint.open(str(MODEL_DIR))))
    with capture_logs() as logged:
        check_peers(graph, role, made)
    assert [(line["event"], line["engine"]) for line in logged] == [
        ("kv_peers_without_effect", engine)
    ] * warns
    assert all("use engine paged or mock" in line["fix"] for line in logged)
