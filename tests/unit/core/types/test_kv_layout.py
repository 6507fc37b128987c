"""How a model's KV is divided over ranks."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.kv import KvLayout

MODEL = KvLayout(
    num_layers=10, num_kv_heads=8, head_dim=128, dtype="bfloat16", element_bytes=2, block_size=16
)


def test_heads_are_shared_by_tp_and_layers_by_pp() -> None:
    layout = MODEL.split(num_blocks=5, tp=2, pp=3)
    assert [rank.layers for rank in layout.ranks[::2]] == [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9)]
    assert [rank.heads for rank in layout.ranks[:2]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {rank.num_blocks for rank in layout.ranks} == {5}


def test_more_ranks_than_heads_hold_them_several_times() -> None:
    assert [rank.heads for rank in MODEL.split(num_blocks=1, tp=16).ranks] == [
        (head,) for head in range(8) for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ({"tp": 3}, "tp: 3 ranks cannot share 8 KV heads; one must divide the other"),
        ({"tp": 0}, "tp: 0 ranks cannot share 8 KV heads; one must divide the other"),
        ({"pp": 11}, "pp: must be 1 to 10, one layer each, got 11"),
    ],
)
def test_what_cannot_be_divided_is_refused(split: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        MODEL.split(num_blocks=1, **split)
    assert refused.value.message == text
