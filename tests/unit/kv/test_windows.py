import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.groups import Windows

GPT_OSS = Windows(((128, 18),), 18)


def kept(window, start, end, block_size):
    """Blocks that a step of tokens `start` to `end` writes, or that are of the window before its first block, in one layer."""
    first = max(0, start // block_size * block_size - window + 1)
    return len({token // block_size for token in range(first, end)})


def test_the_longest_request_fits_with_its_windows():
    assert Windows().tokens_beside(100, 512, 16) == 1600
    assert GPT_OSS.tokens_beside(100, 1, 16) == 91 * 16
    assert GPT_OSS.tokens_beside(8, 1, 16) == 64, "half of it is the windows' of so short a request"
    assert GPT_OSS.tokens_beside(1, 1, 16) == 0


@pytest.mark.parametrize("layers", [1, 3])
@given(st.data())
def test_no_step_of_a_request_needs_more(layers, data):
    block_size = data.draw(st.integers(1, 20))
    window = data.draw(st.integers(1, 60))
    tokens = data.draw(st.integers(1, 200))
    step = data.draw(st.integers(1, 80))
    start = data.draw(st.integers(0, tokens - 1))
    end = min(start + step, tokens)
    most = Windows(((window, layers),), 1).blocks(tokens, step, block_size)
    assert layers * kept(window, start, end, block_size) <= most
