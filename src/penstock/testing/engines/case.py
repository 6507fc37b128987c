"""Base of the engine suites: what is known of the engine under test, and the engines and prompts of a test."""

import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

import pytest

from penstock.core.types.requests import Request
from penstock.seams import Engine, KvBlocks
from penstock.testing.engines.probe import Answer, EngineProbe, EngineSetup
from penstock.testing.engines.shared import SharedEngine
from penstock.testing.loop import run_async

T = TypeVar("T")
FOREVER = 200
"""Tokens of an answer that outlasts its test."""
_EQUAL_SHARE_MIN = 0.2


class EngineCase:
    """Makes engines, prompts and requests. Write `make_engine`, and set what differs from the values below."""

    vocab_size: ClassVar[int] = 256
    """Prompts have token ids below this."""
    eos_token_ids: ClassVar[tuple[int, ...]] = ()
    """The model's; without any, the test of them is skipped."""
    setup: ClassVar[EngineSetup] = EngineSetup()
    """Limits of most engines. Prompts have up to 200 tokens, so keep 256 or more of context, and room for two such
    contexts in the KV blocks. Set `block_size` to what the engine can have: vLLM takes multiples of 32 on a CPU."""
    starts_slowly: ClassVar[bool] = False
    """Set it for an engine that takes seconds to start: tests of a class with equal limits then share one, on one event
    loop, and there is no second one beside it."""
    time_limit_s: ClassVar[float] = 30.0
    """Longest time of a test, starts included."""
    unsupported: ClassVar[frozenset[str]] = frozenset()
    """Fields of `SamplingParams` that the engine refuses where they are set; one test checks that it does, by name."""
    refuses_late: ClassVar[bool] = False
    """Set it where a server behind the engine checks sampling parameters: its refusal comes as a delta with an
    `invalid_request_error` instead of a `RequestError` of `submit`."""
    repeats_seeds: ClassVar[bool] = True
    """Whether sampling with a seed gives the same tokens again. Choices of one seed differ in any case."""
    token_exact_migration: ClassVar[bool] = True
    """Whether a request that goes on here with `num_emitted` tokens from elsewhere has the same tokens, also sampled ones
    and those under penalties. Greedy ones without penalties are the same in any case."""
    equal_tokens_share: ClassVar[float] = 1.0
    """Least share of greedy tokens that stay the same in another batch, up to each answer's first difference. 1.0 for
    float32; less than 0.2 would not tell one request's answer from another's, and is refused."""
    cached_tokens_late: ClassVar[bool] = False
    """Whether the engine may tell `Delta.cached_tokens` with the end of an answer instead of its first tokens."""
    events_delay_s: ClassVar[float] = 0.0
    """Longest time by which KV events follow the answers."""

    _shared: ClassVar[SharedEngine | None] = None
    _test_name = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not _EQUAL_SHARE_MIN <= cls.equal_tokens_share <= 1:
            raise TypeError(
                f"{cls.__name__}.equal_tokens_share: must be between {_EQUAL_SHARE_MIN} and 1, got {cls.equal_tokens_share}"
            )

    def make_engine(self, setup: EngineSetup) -> Engine:
        """Make an engine that is not started.

        Each call makes a new one, of the same model, with block hashes under `DEFAULT_KEY`. What the engine cannot limit as
        `setup` says it reports as it is in `EngineInfo`; the core suite goes by that.
        """
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _name_test(self, request: pytest.FixtureRequest) -> None:
        self._test_name = request.node.name

    @classmethod
    def teardown_class(cls) -> None:
        shared, cls._shared = cls._shared, None
        if shared is not None:
            shared.close()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a test's coroutine within `time_limit_s`, on the event loop of the shared engine if there is one."""
        if not self.starts_slowly:
            return run_async(main, timeout_s=self.time_limit_s)
        return self._sharing().run(main, timeout_s=self.time_limit_s)

    @asynccontextmanager
    async def probe(self, setup: EngineSetup | None = None) -> AsyncIterator[EngineProbe[Engine]]:
        """Start an engine, with the limits of the class unless told otherwise; a shared one is made anew."""
        setup = setup or self.setup
        if self.starts_slowly:
            async with self._sharing().lease(setup, lambda: self._make_probe(setup)) as probe:
                yield probe
            return
        async with self._make_probe(setup) as probe:
            yield probe

    async def lone_engine(self) -> Engine:
        """Make an engine for one test alone, when no shared one is running."""
        if self.starts_slowly:
            await self._sharing().stop()
        return self.make_engine(self.setup)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Make a prompt; each test has its own, since a shared engine has those of others in its cache."""
        rng = random.Random(f"{self._test_name} {seed}")
        return [rng.randrange(self.vocab_size) for _ in range(length)]

    def answer(self, *requests: Request, setup: EngineSetup | None = None) -> list[Answer]:
        """Run requests together on a new engine."""

        async def main() -> list[Answer]:
            async with self.probe(setup) as probe:
                return await probe.run(*requests)

        return self.run(main())

    def check_equal(self, answers: Sequence[Answer], expected: Sequence[Sequence[int]]) -> None:
        """Check that answers have the expected greedy tokens, as far as `equal_tokens_share` says."""
        found = [answer.token_ids for answer in answers]
        if self.equal_tokens_share == 1:
            assert found == [list(token_ids) for token_ids in expected]
            return
        equal = sum(_equal_tokens(*pair) for pair in zip(found, expected, strict=True))
        share = equal / sum(map(len, expected))
        assert share >= self.equal_tokens_share, f"{share:.3f} of the tokens are equal"

    async def check_idle(self, probe: EngineProbe[Engine]) -> None:
        """Check that an engine has nothing left of its requests; `KvBlocks` engines hold no block for them."""
        assert not probe.is_busy
        load = probe.engine.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0)
        assert (load.queued_prefill_tokens, load.context_tokens) == (0, 0)
        if isinstance(probe.engine, KvBlocks):
            assert load.active_blocks == 0

    def needs(self, *fields: str) -> None:
        """Skip a test of sampling parameters that the engine refuses."""
        missing = sorted(self.unsupported.intersection(fields))
        if missing:
            pytest.skip(f"refuses {', '.join(missing)}")

    def _make_probe(self, setup: EngineSetup) -> EngineProbe[Engine]:
        return EngineProbe(
            self.make_engine(setup),
            events_delay_s=self.events_delay_s,
            cached_tokens_late=self.cached_tokens_late,
        )

    @classmethod
    def _sharing(cls) -> SharedEngine:
        if cls._shared is None:
            cls._shared = SharedEngine()
        return cls._shared


def _equal_tokens(found: Sequence[int], expected: Sequence[int]) -> int:
    """Count equal tokens up to the first difference."""
    pairs = zip(found, expected, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected))
    )
