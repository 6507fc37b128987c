import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Prices, Role
from penstock.demo import MODEL_DIR
from penstock.graph import RoleSpec
from penstock.graph.engine_prices import engine_prices, with_step_size

PRICES = Prices(1e-3, 1e-5, 0.0, 1e-3, 0.0, 0.0)


def test_prefill_workers_alone_take_the_smallest_steps_that_keep_them_busy():
    sized = {role: with_step_size(role, RoleSpec(), lambda: PRICES).max_batch_tokens for role in Role}
    assert sized == {Role.PREFILL: 2048, Role.DECODE: None, Role.AGGREGATED: None}


def test_what_the_graph_says_holds():
    assert with_step_size(Role.PREFILL, RoleSpec(max_batch_tokens=99), lambda: PRICES).max_batch_tokens == 99
    room = with_step_size(Role.PREFILL, RoleSpec(max_running_requests=3000), lambda: PRICES)
    assert room.max_batch_tokens == 3000


def test_an_engine_of_which_nobody_can_tell_chooses_itself():
    def unknown() -> Prices:
        raise ConfigError("a model of no known shape")

    assert with_step_size(Role.PREFILL, RoleSpec(), unknown).max_batch_tokens is None


@pytest.mark.parametrize("engine", ["mock", "paged"])
def test_every_engine_that_runs_here_has_prices_to_go_by(engine):
    spec = RoleSpec(engine=engine)
    assert with_step_size(Role.PREFILL, spec, lambda: engine_prices(spec, MODEL_DIR)).max_batch_tokens
