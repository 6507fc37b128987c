import msgspec
import pytest

from penstock.core.errors import RequestError
from penstock.core.types.instances import EngineInfo
from penstock.core.types.requests import MediaItem, MediaKind, MediaPrompt, Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.worker.frontends import check_request

INFO = EngineInfo(
    block_size=16, total_blocks=9, context_length=99, max_batch_tokens=9, max_running_requests=9
)
IMAGE = MediaKind(modality="image", placeholder="", items_max=4)
PICTURE = MediaPrompt(token_ids=pack_tokens([1, 2]), items=(MediaItem.of("image", b"file"),))


@pytest.mark.parametrize(
    ("asked", "has", "param", "why"),
    [
        ({"structured": b'{"json_object": true}'}, {"structured_outputs": True}, "response_format", ".* paged or vllm"),
        ({"logit_bias": ((1, 2.0),)}, None, "logit_bias", ".*'m' does not have it"),
        ({"allowed_token_ids": (1,)}, None, "allowed_token_ids", ".*'m' does not have it"),
        ({"bad_words": ((1,),)}, None, "bad_words", ".*'m' does not have it"),
        ({"prompt_logprobs": 0}, None, "prompt_logprobs", "got 0, .*'m' gives no .* paged, mock or vllm"),
        ({"prompt_logprobs": 2}, None, "prompt_logprobs", "got 2, .*'m' gives no .* paged, mock or vllm"),
        ({"embeds": True}, {"embedding_size": 8}, "model", ".*'m' makes no embeddings; .* such as paged"),
        ({"media": PICTURE}, {"media": (IMAGE,)}, None, ".*'m' takes no image; .* such as vllm"),
    ],
)  # fmt: skip
def test_engines_get_only_what_they_have(
    asked: dict[str, object], has: dict[str, object] | None, param: str | None, why: str
) -> None:
    """`has` is what an engine that takes it says; None: its sampling fields."""
    of_request = {name: value for name, value in asked.items() if name in Request.__struct_fields__}
    sampling = {name: value for name, value in asked.items() if name not in of_request}
    request = Request(
        request_id="r",
        model="m",
        token_ids=pack_tokens([1, 2]),
        sampling=SamplingParams(max_tokens=4, **sampling),
        **of_request,
    )
    with pytest.raises(RequestError, match=why) as refused:
        check_request(request, INFO, (), "worker-1")
    assert param in {None, refused.value.param}
    capable = msgspec.structs.replace(INFO, **(has or {"sampling_fields": (param,)}))
    check_request(request, capable, (), "worker-1")
