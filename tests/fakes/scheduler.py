"""The model, scheduler and KV cache inside of a fake package: the mock engine, with one queue of deltas for each request."""

import asyncio
import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from itertools import count
from types import ModuleType

from msgspec import structs

from penstock.core.hashing import block_hashes
from penstock.core.ids import RequestId
from penstock.core.types.requests import Delta, Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.testing.engines.probe import EngineSetup
from penstock.testing.engines.reference import reference_engine

_ids = count()
_answers: dict[tuple[int, ...], list[int]] = {}
"""Greedy answers by their prompts, of all engines: the mock's tokens depend on where the prompt ends, a model's do not."""
_ANSWERS_MAX = 2000


class FakeScheduler:
    """Runs requests on a mock engine. `tokens_of` has the block of tokens and the parent of each hash that it may publish."""

    def __init__(self, setup: EngineSetup, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.setup = setup
        self.engine = reference_engine(setup, vocab_size, eos_token_ids)
        self.on_events = lambda events: None
        self.tokens_of = {}
        self._queues = {}
        self._requests = {}
        self._task = None

    @property
    def is_started(self) -> bool:
        return self._task is not None

    async def _run(self) -> None:
        async for step in self.engine.steps():
            for delta in step.deltas:
                request = self._requests[delta.request_id]
                request.tokens += list(memoryview(delta.token_ids).cast("i")) if delta.token_ids else []
                self._note(request)
                self._queues[delta.request_id].put_nowait(delta)
            if step.events:
                self.on_events(step.events)

    def _note(self, served: "_Served") -> None:
        size = self.setup.block_size
        hashes = [int(low) for low in block_hashes(pack_tokens(served.tokens), size, served.salt)[:, 0]]
        for number, low64 in enumerate(hashes):
            parent = hashes[number - 1] if number else None
            self.tokens_of[low64] = (served.tokens[number * size : (number + 1) * size], parent, served.salt)

    async def serve(self, token_ids, sampling: SamplingParams, *, salt: bytes = b"", holder=None):
        """Yield the deltas of a request; `holder` gets its id, for `abort`."""
        if self._task is None:
            await self.engine.start()
            self._task = asyncio.get_running_loop().create_task(self._run())
        request_id = RequestId(f"fake{next(_ids)}")
        if holder is not None:
            holder.append(request_id)
        num_emitted = 0 if sampling.temperature else _num_emitted(token_ids)
        if num_emitted:
            more = {
                "max_tokens": sampling.max_tokens + num_emitted,
                "min_tokens": sampling.min_tokens + num_emitted,
            }
            sampling = structs.replace(sampling, **more)
        self._queues[request_id] = queue = asyncio.Queue()
        self._requests[request_id] = _Served(list(token_ids), salt)
        self._note(self._requests[request_id])
        request = Request(
            request_id=request_id,
            model="",
            token_ids=pack_tokens(token_ids),
            sampling=sampling,
            salt=salt,
            num_emitted=num_emitted,
        )
        self.engine.submit(request)
        answer = None if sampling.temperature or num_emitted else _answers.setdefault(tuple(token_ids), [])
        if len(_answers) > _ANSWERS_MAX:
            del _answers[next(iter(_answers))]
        try:
            while True:
                delta: Delta | None = await queue.get()
                if delta is None:
                    return
                if answer is not None:
                    served = self._requests[request_id].tokens[len(token_ids) :]
                    answer[:] = max(answer, served, key=len)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.engine.abort(request_id)

    def abort(self, request_id: RequestId) -> None:
        self.engine.abort(request_id)
        self._queues[request_id].put_nowait(None)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _num_emitted(token_ids) -> int:
    """Count the tokens at the end of a prompt that are the beginning of a known answer."""
    for prompt, answer in _answers.items():
        rest = list(token_ids[len(prompt) :])
        if rest and tuple(token_ids[: len(prompt)]) == prompt and rest == answer[: len(rest)]:
            return len(rest)
    return 0


class _Served:
    def __init__(self, tokens: list[int], salt: bytes) -> None:
        self.tokens = tokens
        self.salt = salt


@contextmanager
def installed(name: str, contents: ModuleType, version: str):
    """Let `import name` give a fake inside."""
    module = ModuleType(name)
    module.__dict__.update({key: value for key, value in vars(contents).items() if not key.startswith("__")})
    module.__version__ = version
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield module
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
