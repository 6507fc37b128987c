"""What an outbox merges, splits and drops; its order and credit are those of the machine of tests/properties."""

from penstock.core.errors import Parked, from_info
from penstock.core.types.requests import Delta, FinishReason, KvHandle, PromptLogprobs, TokenLogprob
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.runtime.requests.outbox import Outbox


class Box(Outbox):
    """An outbox of open requests."""

    def __init__(self, *names, window_tokens=4, stream_bytes_max=10_000, bytes_max=100_000):
        self.aborted = []
        super().__init__(
            window_tokens=window_tokens,
            stream_bytes_max=stream_bytes_max,
            bytes_max=bytes_max,
            abort=self.aborted.append,
        )
        for name in names or ("a",):
            self.open(name)


def delta(request_id, tokens=(), **fields):
    return Delta(request_id=request_id, token_ids=pack_tokens(tokens), **fields)


def tokens(deltas):
    return [token for d in deltas for token in unpack_tokens(d.token_ids).tolist()]


def test_a_merged_delta_keeps_every_field_in_its_place():
    box = Box(window_tokens=0)
    logprobs = [TokenLogprob(token_id=t, logprob=-float(t), top=((t, -1.0),)) for t in (1, 2, 3)]
    handle = KvHandle(prefill_worker=1, pin_id=2, ttl_s=3.0, num_tokens=64, block_ids=b"x" * 100)
    box.offer([delta("a", [1], cached_tokens=16, logprobs=tuple(logprobs[:1]))], writable=True)
    box.offer([delta("a", [2, 3], logprobs=tuple(logprobs[1:]))], writable=True)
    box.offer([delta("a", [], finish_reason=FinishReason.PREFILLED, kv=handle)], writable=True)
    box.check()
    box.grant("a", 1)
    (first,) = box.take()
    assert first == delta("a", [1], cached_tokens=16, logprobs=tuple(logprobs[:1]))
    box.check()
    box.grant("a", 2)
    (last,) = box.take()
    assert last == delta(
        "a", [2, 3], logprobs=tuple(logprobs[1:]), finish_reason=FinishReason.PREFILLED, kv=handle
    )
    assert len(box) == 0


def test_what_is_held_can_be_taken_in_parts_and_in_turns():
    box = Box("a", "b", window_tokens=1000)
    box.offer([delta("a", range(100)), delta("b", range(100))], writable=False)
    taken = {"a": [], "b": []}
    turns = []
    while box.has_held:
        part = box.take(bytes_max=160)
        box.check()
        assert sum(len(d.token_ids) for d in part) <= 160
        for d in part:
            taken[d.request_id] += tokens([d])
            turns.append(d.request_id)
    assert taken == {"a": list(range(100)), "b": list(range(100))}
    assert turns[:4] == ["a", "b", "a", "b"]


def test_who_is_far_too_slow_is_parked_and_nothing_is_lost():
    box = Box(stream_bytes_max=2000)
    out = []
    for start in range(0, 10_000, 100):
        out += box.offer([delta("a", range(start, start + 100))], writable=True)
        box.check()
    assert box.aborted == ["a"], "its engine stops"
    assert box.parked == 1
    assert tokens(out) == [0, 1, 2, 3], "what there was credit for"
    assert box.held_bytes <= 2000 + 400
    while len(box):
        box.grant("a", 60)
        out += box.take()
        box.check()
    assert tokens(out) == list(range(len(tokens(out))))
    assert len(tokens(out)) == 500, "all that was held when it was parked"
    assert [d for d in out if d.error is not None] == out[-1:]
    assert isinstance(from_info(out[-1].error), Parked)
    assert out[-1].finish_reason is FinishReason.ERROR
    assert box.held_bytes == 0


def test_what_ends_with_the_delta_that_is_too_much_has_ended():
    box = Box(window_tokens=0, stream_bytes_max=2000)
    box.offer([delta("a", range(1000), finish_reason=FinishReason.STOP)], writable=True)
    assert box.aborted == []
    box.grant("a", 1000)
    (last,) = box.take()
    assert (last.finish_reason, last.error) == (FinishReason.STOP, None)


def test_all_together_are_bounded_and_the_largest_is_dropped():
    box = Box("small", "large", window_tokens=0, bytes_max=10_000)
    box.offer([delta("small", range(1000))], writable=True)
    (parked,) = box.offer([delta("large", range(1500), finish_reason=FinishReason.LENGTH)], writable=True)
    assert parked.request_id == "large"
    assert tokens([parked]) == [], "it is computed again"
    assert isinstance(from_info(parked.error), Parked)
    assert box.aborted == ["large"]
    box.check()


def test_alternatives_count():
    box = Box(window_tokens=0, stream_bytes_max=3000)
    top = tuple((t, -1.0) for t in range(20))
    box.offer(
        [delta("a", [1, 2], logprobs=(TokenLogprob(token_id=1, logprob=-1.0, top=top),) * 2)], writable=True
    )
    assert box.aborted == ["a"]


def test_prompt_logprobs_wait_in_order_and_count_by_their_bytes():
    parts = [
        PromptLogprobs(start=at, token_ids=pack_tokens([at]), logprobs=bytes(4), ranks=pack_tokens([1]))
        for at in (1, 2, 3)
    ]
    box = Box()
    before = box.held_bytes
    for part in parts[:2]:
        assert box.offer([delta("a", prompt_logprobs=(part,))], writable=False) == []
    assert box.held_bytes > before + 2 * 12
    assert box.offer([delta("a", range(9), prompt_logprobs=parts[2:])], writable=False) == []
    (first,) = box.take()
    assert list(first.prompt_logprobs) == parts
    assert tokens([first]) == [0, 1, 2, 3], "as many as it has credit"
    box.check()
    box.grant("a", 9)
    (second,) = box.take()
    assert second.prompt_logprobs == ()
    assert box.held_bytes == 0
    box.check()
