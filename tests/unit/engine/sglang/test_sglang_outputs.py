"""Chunks as SGLang 0.5.23 shapes them (tests/data/sglang) become outputs."""

import json
from pathlib import Path

import pytest

from penstock.core.errors import Overloaded, RequestError, StepFailed
from penstock.core.types.requests import FinishReason, SamplingParams
from penstock.engine.sglang.outputs import generate_arguments, read_chunk
from penstock.engine.streams.backend import Call
from penstock.testing.engines.probe import make_request

CHUNKS = json.loads((Path(__file__).parents[3] / "data/sglang/chunks.json").read_text())


def _call(**sampling) -> Call:
    request = make_request("a", range(5), sampling=SamplingParams(max_tokens=9, **sampling), salt=b"\x01\x02")
    tokens = list(range(5))
    return Call(
        number=1,
        request=request,
        token_ids=tokens,
        sampling=request.sampling,
        max_new_tokens=9,
        min_new_tokens=2,
    )


@pytest.mark.parametrize(
    ("name", "last", "reason"),
    [("increments", 2, FinishReason.STOP), ("cumulative", 14, FinishReason.LENGTH)],
)
def test_of_increments_and_of_the_output_so_far_the_new_tokens_are_taken(name, last, reason) -> None:
    call, outputs = _call(), []
    for chunk in CHUNKS[name]:
        outputs.append(read_chunk(chunk, call, (2,)))
        call.num_generated += len(outputs[-1].token_ids)
    assert [list(output.token_ids) for output in outputs] == [[11], [12, 13], [last]]
    assert [output.finish_reason for output in outputs] == [None, None, reason]
    if name == "increments":
        assert (outputs[0].cached_tokens, outputs[-1].preemptions) == (4, 1)


def test_logprobs_come_with_their_tokens_and_a_stop_token_that_was_left_out_is_added() -> None:
    output = read_chunk(CHUNKS["logprobs"], _call(logprobs=2), ())
    assert [(each.token_id, each.logprob) for each in output.logprobs] == [(12, -0.5), (13, -1.5)]
    assert [each.top for each in output.logprobs] == [((12, -0.5), (4, -0.9)), ((7, -0.2), (13, -1.5))]
    output = read_chunk(CHUNKS["without_stop_token"], _call(stop_token_ids=(99,)), (2,))
    assert list(output.token_ids) == [12, 99]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("refused", RequestError, "exceeds the maximum allowed length"),
        ("full", Overloaded, "queue is full"),
        ("transfer", StepFailed, "Decode transfer failed"),
        ("aborted", StepFailed, "Aborted"),
    ],
)
def test_an_abort_is_an_error_of_the_right_kind(name, error, text) -> None:
    meta = {"finish_reason": CHUNKS["aborts"][name], "completion_tokens": 0}
    with pytest.raises(error, match=text):
        read_chunk({"output_ids": [], "meta_info": meta}, _call(), ())


def test_a_request_in_sglangs_words() -> None:
    arguments = generate_arguments(_call(top_k=40, logprobs=0, stop_token_ids=(5,)), "rid")
    assert (arguments["input_ids"], arguments["cache_salt"]) == ([0, 1, 2, 3, 4], "0102")
    assert (arguments["return_logprob"], arguments["top_logprobs_num"]) == (True, 0)
    params = arguments["sampling_params"]
    assert (params["max_new_tokens"], params["min_new_tokens"]) == (9, 2)
    assert (params["top_k"], params["stop_token_ids"]) == (40, [5])
    assert generate_arguments(_call(), "rid")["sampling_params"]["top_k"] == -1
