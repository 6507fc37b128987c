import pytest

from penstock.core.errors import ConfigError
from penstock.demo import MODEL_DIR
from penstock.deploy.engine_spec import engine_spec
from penstock.engine.paged.checkpoint import Checkpoint
from penstock.graph import Graph, RoleSpec


def test_tiers_that_no_engine_has_are_refused():
    checkpoint = Checkpoint.open(str(MODEL_DIR))
    graph, role = Graph(model="m"), RoleSpec(engine="mock", kv_tiers={"host": 2, "disk": 0.5})
    with pytest.raises(ConfigError, match=r"'mock' keeps KV on its device alone.* got host 2, disk 0.5"):
        engine_spec(graph, role, checkpoint)
    assert engine_spec(graph, RoleSpec(engine="mock"), checkpoint).kv_blocks is None
