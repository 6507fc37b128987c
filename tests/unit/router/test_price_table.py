import pytest

from penstock.core.ids import WorkerId
from penstock.core.types.instances import EngineInfo, Instance, ModelCard, Prices, Role
from penstock.perf.topology import NetworkPath
from penstock.router.fleet.prices import PriceTable


def instance(
    token_s: float | None, *, batch_tokens: int = 512, prompts_at_once: int = 1, **more: object
) -> Instance:
    prices = None
    if token_s is not None:
        prices = Prices(
            prefill_step_s=0.001,
            prefill_token_s=token_s,
            prefill_pair_s=1e-9,
            decode_step_s=0.002,
            decode_sequence_s=1e-5,
            decode_token_s=1e-8,
            **more,
        )
    return Instance(
        worker_id=WorkerId(1),
        name="w",
        address="a",
        role=Role.AGGREGATED,
        card=ModelCard(name="m", context_length=8, block_size=4, salt=b""),
        engine=EngineInfo(
            block_size=4,
            total_blocks=8,
            context_length=8,
            max_batch_tokens=batch_tokens,
            max_running_requests=4,
            prompts_at_once=prompts_at_once,
        ),
        prices=prices,
    )


def test_who_says_nothing_is_taken_for_the_median_of_the_others():
    table = PriceTable(5)
    for slot, token_s in enumerate((1e-5, 3e-5, 9e-5, None)):
        table.put(slot, instance(token_s, batch_tokens=100 * (slot + 1)))
    columns = table.columns()
    assert columns.prefill_token_s.tolist() == [1e-5, 3e-5, 9e-5, 3e-5, 3e-5]
    assert columns.batch_tokens.tolist() == [100, 200, 300, 400, 1]  # its own all the same; slot 4 is free
    table.put(3, instance(4e-5))
    table.remove(0)
    assert table.columns().prefill_token_s.tolist() == [4e-5, 3e-5, 9e-5, 4e-5, 4e-5]
    table.check()


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1.0])
def test_what_is_no_price_counts_as_nothing(nonsense):
    table = PriceTable(1)
    table.put(0, instance(nonsense))
    table.check()
    assert table.columns().prefill_token_s.tolist() == [0.0]


def test_the_median_of_the_others_follows_a_worker_that_leaves():
    table = PriceTable(3)
    for slot, token_s in enumerate((1e-5, 3e-5)):
        table.put(slot, instance(token_s))
    assert table.columns().prefill_token_s.tolist() == [1e-5, 3e-5, 2e-5]
    table.grow(4)
    table.remove(0)
    assert table.columns().prefill_token_s.tolist() == [3e-5] * 4
    table.check()


def test_the_way_to_a_worker_is_its_own_though_its_prices_are_others():
    table = PriceTable(3)
    table.put(0, instance(1e-5))
    table.put(1, instance(None), path=NetworkPath(latency_s=0.04, bandwidth_bytes_per_s=1e8))
    columns = table.columns()
    assert columns.round_trip_s.tolist() == [0.0, 0.08, 0.0]
    assert columns.byte_s.tolist() == [0.0, 1e-8, 0.0]
    assert columns.prefill_token_s.tolist() == [1e-5] * 3
