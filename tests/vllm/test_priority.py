"""Which of several waiting requests vLLM takes first."""

import pytest

from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens

pytestmark = pytest.mark.nightly


def request_of(name, priority, tokens):
    return Request(
        request_id=name,
        model="tiny",
        token_ids=pack_tokens(range(20, 50)),
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        priority=priority,
    )


def test_a_higher_priority_goes_first(started, spec_of):
    running = started(spec_of(max_running_requests=1))
    requests = [request_of("first", 2, 12), *(request_of(f"p{level}", level, 4) for level in (-1, 0, 1))]

    async def finished():
        for request in requests:
            running.engine.submit(request)
        names = []
        while len(names) < len(requests):
            step = await running.next_step()
            names += [delta.request_id for delta in step.deltas if delta.finish_reason is not None]
        return names

    assert running.do(finished()) == ["first", "p1", "p0", "p-1"]
