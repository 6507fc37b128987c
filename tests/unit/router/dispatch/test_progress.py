"""What a request has come to, and how it would go on elsewhere."""

import msgspec

from penstock.core.errors import RequestError
from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.requests import (
    Delta,
    FinishReason,
    MediaItem,
    MediaPrompt,
    PromptLogprobs,
    Request,
)
from penstock.core.wire import pack_hashes, pack_tokens, unpack_tokens
from penstock.router.dispatch.progress import Progress
from tests.support.cluster import small_card
from tests.support.scene import make_request

KEY = bytes(range(16))


def asked(prompt: list[int], **fields: object) -> Request:
    return make_request("r", prompt, salt=b"s", **fields)


def make_delta(*token_ids: int, **fields: object) -> Delta:
    return Delta(request_id=RequestId("r"), token_ids=pack_tokens(token_ids), **fields)


def test_each_move_sends_the_prompt_all_tokens_and_their_hashes():
    progress = Progress(asked([1, 2, 3, 4, 5]), small_card(), KEY)
    output: list[int] = []
    for tokens in ([], [6], [7, 8], [9, 10, 11, 12, 13], []):
        if tokens:
            progress.add(make_delta(*tokens))
            output += tokens
        request = progress.request()
        everything = [1, 2, 3, 4, 5, *output]
        assert unpack_tokens(request.token_ids).tolist() == everything
        assert request.num_emitted == len(output)
        assert request.block_hashes == pack_hashes(block_hashes(everything, 4, b"s", key=KEY))
    assert progress.prompt_tokens == 5
    assert progress.output_tokens == 8


def test_an_error_is_not_for_the_reader_but_the_tokens_beside_it_are():
    progress = Progress(asked([1]), small_card(), KEY)
    error = RequestError("no").to_info()
    progress.add(make_delta(error=error, finish_reason=FinishReason.ERROR))
    assert not progress.unread
    progress.add(make_delta(5, error=error, finish_reason=FinishReason.ERROR))
    delta = progress.take()
    assert unpack_tokens(delta.token_ids).tolist() == [5]
    assert delta.error is None
    assert delta.finish_reason is None


def test_images_go_along_and_stay_in_the_hashes():
    """One begins in the prompt's first block, another in its last one, which only the answer fills."""
    items = tuple(
        msgspec.structs.replace(MediaItem.of("image", data), position=position)
        for data, position in ((b"one", 1), (b"two", 6))
    )
    media = MediaPrompt(token_ids=pack_tokens([1, 9]), items=items)
    prompt = [1, 9, 9, 2, 3, 4, 9]
    extra = [(1, items[0].digest), (6, items[1].digest)]
    hashes = pack_hashes(block_hashes(prompt, 4, b"s", extra, key=KEY))
    request = msgspec.structs.replace(asked(prompt, block_hashes=hashes), media=media)
    progress = Progress(request, small_card(), KEY)
    progress.add(make_delta(5, 6, 7, 8, 9))
    moved = progress.request()
    assert moved.media == media
    assert moved.block_hashes == pack_hashes(block_hashes([*prompt, 5, 6, 7, 8, 9], 4, b"s", extra, key=KEY))


def reported(start: int, end: int) -> PromptLogprobs:
    """Two values at each token of [start, end); ranks are the tokens' places."""
    places = list(range(start, end))
    twice = pack_tokens([place for place in places for _ in range(2)])
    return PromptLogprobs(start=start, token_ids=twice, logprobs=bytes(twice), ranks=pack_tokens(places))


def test_prompt_logprobs_are_asked_for_until_all_have_come_and_given_once():
    prompt = list(range(10, 19))
    request = asked(prompt)
    request = msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1)
    )
    progress = Progress(request, small_card(), KEY)
    assert progress.request().sampling == request.sampling
    progress.add(make_delta(prompt_logprobs=(reported(1, 4),)))
    sampling = progress.request().sampling
    assert (sampling.prompt_logprobs, sampling.prompt_logprobs_from) == (1, 4)
    progress.add(make_delta(prompt_logprobs=(reported(1, 3),)))  # by another worker, from the start
    progress.add(make_delta(prompt_logprobs=(reported(3, 7),)))
    progress.add(make_delta(prompt_logprobs=(reported(5, 9),)))
    progress.add(make_delta(20))
    delta = progress.take()
    assert [(part.start, part.end) for part in delta.prompt_logprobs] == [(1, 4), (4, 7), (7, 9)]
    for part in delta.prompt_logprobs:
        places = unpack_tokens(part.ranks).tolist()
        assert places == list(range(part.start, part.end))
        assert unpack_tokens(part.token_ids).tolist() == [place for place in places for _ in range(2)]
        assert len(part.logprobs) == 8 * len(places)
    assert unpack_tokens(delta.token_ids).tolist() == [20]
    sampling = progress.request().sampling
    assert (sampling.prompt_logprobs, sampling.prompt_logprobs_from) == (None, 0)
