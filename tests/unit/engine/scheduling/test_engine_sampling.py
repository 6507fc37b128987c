import math
import re

import pytest

from penstock.core.errors import RequestError
from penstock.core.types.requests import SamplingParams
from penstock.engine.scheduling.sequences import LOGPROBS_MAX, checked_sampling


def check(**params):
    sampling = SamplingParams(**{"max_tokens": 5} | params)
    return sampling, checked_sampling(sampling, vocab_size=100, context_length=64)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", math.nan, ">= 0 and <= 1000"),
        ("temperature", -0.1, ">= 0 and <= 1000"),
        ("temperature", math.inf, ">= 0 and <= 1000"),
        ("top_p", 0.0, "> 0 and <= 1"),
        ("top_p", math.nan, "> 0 and <= 1"),
        ("top_k", 0, ">= 1, or none"),
        ("min_p", 1.1, ">= 0 and <= 1"),
        ("presence_penalty", -101, ">= -100 and <= 100"),
        ("frequency_penalty", math.inf, ">= -100 and <= 100"),
        ("repetition_penalty", 0.0, ">= 0.001 and <= 1000"),
        ("seed", 1 << 63, f">= {-(1 << 63)} and <= {(1 << 63) - 1}"),
        ("logprobs", LOGPROBS_MAX + 1, f">= 0 and <= {LOGPROBS_MAX}"),
        ("min_tokens", -1, ">= 0"),
    ],
)
def test_a_refusal_names_field_value_and_limits(field, value, expected):
    with pytest.raises(RequestError, match=re.escape(f"{field}: must be {expected}, got {value}")) as refused:
        check(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": (3, -2)},
        {"logit_bias": ((100, 1.0),)},
        {"logit_bias": ((1, math.nan),)},
        {"logit_bias": ((1, 1e6),)},
        {"allowed_token_ids": (-1,)},
        {"bad_words": ((3, 100),)},
        {"bad_words": ((),)},
    ],
)
def test_token_ids_and_biases_out_of_their_range_are_refused(params):
    with pytest.raises(RequestError, match=next(iter(params))):
        check(**params)


def test_usual_parameters_stay_the_same_object():
    sampling, checked = check(temperature=0.7, top_k=100, top_p=0.9, seed=-(1 << 63), stop_token_ids=(99,))
    assert checked is sampling


def test_what_asks_for_more_than_there_is_becomes_its_equal():
    _, checked = check(top_k=1 << 63, min_tokens=1 << 63, stop_token_ids=(1, 100, 99, 1 << 64))
    assert (checked.top_k, checked.min_tokens, checked.stop_token_ids) == (100, 64, (1, 99))
