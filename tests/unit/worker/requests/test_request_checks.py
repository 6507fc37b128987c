import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.types.instances import EngineInfo
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.worker.requests.checks import check_request

INFO = EngineInfo(
    block_size=16, total_blocks=9, context_length=99, max_batch_tokens=9, max_running_requests=9
)


def test_only_engines_that_constrain_their_output_get_such_requests() -> None:
    request = Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens([1, 2]),
        sampling=SamplingParams(max_tokens=4, structured=b'{"json_object": true}'),
    )
    with pytest.raises(RequestError, match=r"response_format: .* paged or vllm") as refused:
        check_request(request, INFO, (), "worker-1")
    assert refused.value.param == "response_format"
    check_request(request, msgspec.structs.replace(INFO, structured_outputs=True), (), "worker-1")


def test_only_engines_with_embeddings_are_asked_for_them() -> None:
    request = Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens([1, 2]),
        sampling=SamplingParams(max_tokens=1),
        embeds=True,
    )
    with pytest.raises(RequestError, match=r"model: the engine of 'm' makes no embeddings; .* such as paged"):
        check_request(request, INFO, (), "worker-1")
    check_request(request, msgspec.structs.replace(INFO, embedding_size=8), (), "worker-1")


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", ((1, 2.0),)), ("allowed_token_ids", (1,)), ("bad_words", ((1,),))]
)
def test_engines_get_only_the_sampling_fields_that_they_have(name: str, value: object) -> None:
    sampling = msgspec.structs.replace(SamplingParams(max_tokens=4), **{name: value})
    request = Request(request_id="r", model="m", token_ids=pack_tokens([1, 2]), sampling=sampling)
    with pytest.raises(RequestError, match=f"{name}: the engine of model 'm' does not have it") as refused:
        check_request(request, INFO, (), "worker-1")
    assert refused.value.param == name
    check_request(request, msgspec.structs.replace(INFO, sampling_fields=(name,)), (), "worker-1")


@pytest.mark.parametrize("alternatives", [0, 2])
def test_prompt_logprobs_are_refused_by_engines_without(alternatives: int) -> None:
    request = Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens([1, 2]),
        sampling=SamplingParams(max_tokens=1, prompt_logprobs=alternatives),
    )
    match = rf"prompt_logprobs: got {alternatives}, .* engine of model 'm' gives no .* paged, mock or vllm"
    with pytest.raises(RequestError, match=match) as refused:
        check_request(request, INFO, (), "worker-1")
    assert refused.value.param == "prompt_logprobs"
    check_request(
        request, msgspec.structs.replace(INFO, sampling_fields=("prompt_logprobs",)), (), "worker-1"
    )
