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
    return Call(
        number=1,
        request=request,
        token_ids=list(range(5)),
        sampling=request.sampling,
        max_new_tokens=9,
        min_new_tokens=0,
    )


def _read_all(chunks, call: Call):
    outputs = []
    for chunk in chunks:
        outputs.append(read_chunk(chunk, call, (2,)))
        call.num_generated += len(outputs[-1].token_ids)
    return outputs


def test_increments_are_taken_as_they_are() -> None:
    outputs = _read_all(CHUNKS["increments"], _call())
    assert [list(output.token_ids) for output in outputs] == [[11], [12, 13], [2]]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.STOP]
    assert outputs[0].cached_tokens == 4
    assert outputs[-1].preemptions == 1


def test_of_the_output_so_far_only_the_new_tokens_are_taken() -> None:
    outputs = _read_all(CHUNKS["cumulative"], _call())
    assert [list(output.token_ids) for output in outputs] == [[11], [12, 13], [14]]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_logprobs_come_with_their_tokens() -> None:
    output = read_chunk(CHUNKS["logprobs"], _call(logprobs=2), ())
    assert [(each.token_id, each.logprob) for each in output.logprobs] == [(12, -0.5), (13, -1.5)]
    assert [each.top for each in output.logprobs] == [((12, -0.5), (4, -0.9)), ((7, -0.2), (13, -1.5))]


def test_a_stop_token_that_was_left_out_is_added() -> None:
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
    call = _call(temperature=0.7, top_k=40, seed=3, logprobs=0, stop_token_ids=(5,), min_tokens=2)
    call.min_new_tokens = 2
    arguments = generate_arguments(call, "rid")
    assert arguments["input_ids"] == [0, 1, 2, 3, 4]
    assert arguments["cache_salt"] == "0102"
    assert (arguments["return_logprob"], arguments["top_logprobs_num"]) == (True, 0)
    params = arguments["sampling_params"]
    assert params["max_new_tokens"], params["min_new_tokens"] == (9, 2)
    assert params["top_k"] == 40
    assert params["stop_token_ids"] == [5]
    assert generate_arguments(_call(), "rid")["sampling_params"]["top_k"] == -1
