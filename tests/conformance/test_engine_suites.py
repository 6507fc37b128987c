"""The engine suites themselves: an engine unlike Penstock's own passes, faulty ones are caught."""

import pytest
from msgspec import structs

from penstock.core.errors import RequestError
from penstock.core.types.events import BlockRemoved, BlockStored
from penstock.core.types.requests import FinishReason
from penstock.core.wire import NO_TOKENS
from penstock.testing.engines.caching import CachingEngineSuite
from penstock.testing.engines.engine import EngineSuite
from penstock.testing.engines.movable_kv import MovableKvSuite
from penstock.testing.engines.probe import EngineSetup
from penstock.testing.engines.reference import reference_engine
from tests.support.foreign_engine import ForeignEngine

SETUP = EngineSetup(block_size=32, kv_blocks=64)


@pytest.mark.slow
class TestForeignEngine(EngineSuite, CachingEngineSuite):
    """All that an adapter may say of its engine, on one engine for all tests of equal limits."""

    eos_token_ids = (7, 9)
    setup = SETUP
    starts_slowly = True
    unsupported = frozenset({"min_tokens"})
    refuses_late = True
    repeats_seeds = False
    token_exact_migration = False
    events_delay_s = 0.1
    made = 0

    def make_engine(self, setup):
        type(self).made += 1
        return ForeignEngine(lambda: reference_engine(setup, self.vocab_size, self.eos_token_ids))

    async def clear_cache(self, engine):
        await engine.clear()

    @classmethod
    def teardown_class(cls):
        super().teardown_class()
        assert cls.made <= 8, "tests with equal limits share an engine"


class Faulty(ForeignEngine):
    """Spoils the steps of a good engine."""

    fault = ""

    def submit(self, request):
        if self.fault == "forgets what was emitted":
            sampling = request.sampling
            more = structs.replace(sampling, max_tokens=sampling.max_tokens + request.num_emitted)
            request = structs.replace(request, sampling=more)
        if self.fault == "serves what it does not support" and request.sampling.min_tokens:
            request = structs.replace(request, sampling=structs.replace(request.sampling, min_tokens=0))
        if self.fault == "refuses without a name" and request.sampling.top_p == -1:
            raise RequestError("no")
        super().submit(request)

    def abort(self, request_id):
        if self.fault != "aborts nothing":
            super().abort(request_id)

    def load(self):
        load = super().load()
        return structs.replace(load, queued_prefill_tokens=0) if self.fault == "hides its queue" else load

    async def steps(self):
        whole = {}
        async for step in super().steps():
            yield self._spoilt(step, whole)

    def _spoilt(self, step, whole):
        match self.fault:
            case "says nothing is cached":
                deltas = (structs.replace(d, cached_tokens=d.cached_tokens and 0) for d in step.deltas)
                return structs.replace(step, deltas=tuple(deltas))
            case "hides evictions":
                kept = tuple(event for event in step.events if not isinstance(event, BlockRemoved))
                return structs.replace(step, events=kept)
            case "has hashes of its own":
                return structs.replace(step, events=tuple(map(_reversed, step.events)))
            case "does not stream":
                deltas = []
                for delta in step.deltas:
                    tokens = whole.pop(delta.request_id, b"") + delta.token_ids
                    if delta.finish_reason is None:
                        whole[delta.request_id] = tokens
                    else:
                        deltas.append(structs.replace(delta, token_ids=tokens, cached_tokens=0))
                return structs.replace(step, deltas=tuple(deltas))
            case "drops the last token":
                return structs.replace(step, deltas=tuple(map(_cut, step.deltas)))
        return step


def _reversed(event):
    return (
        structs.replace(event, block_hashes=event.block_hashes[::-1])
        if isinstance(event, BlockStored)
        else event
    )


def _cut(delta):
    if delta.finish_reason is not FinishReason.STOP:
        return delta
    return structs.replace(delta, token_ids=delta.token_ids[:-4] or NO_TOKENS)


class Suite(EngineSuite, CachingEngineSuite):
    eos_token_ids = (7, 9)
    setup = SETUP
    unsupported = frozenset({"min_tokens"})
    refuses_late = True
    events_delay_s = 0.05
    time_limit_s = 30.0

    def __init__(self, fault=""):
        self._fault = fault

    def make_engine(self, setup):
        engine = Faulty(lambda: reference_engine(setup, self.vocab_size, self.eos_token_ids))
        engine.fault = self._fault
        return engine


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("forgets what was emitted", "test_a_request_moved_to_another_engine_continues_with_the_same_tokens"),
        ("serves what it does not support", "test_unsupported_fields_are_refused_by_name"),
        ("refuses without a name", "test_extreme_values_are_refused_or_served_without_effect_on_others"),
        ("aborts nothing", "test_aborted_requests_are_silent_and_leave_nothing"),
        ("hides its queue", "test_the_load_counts_all_requests_and_their_work"),
        ("does not stream", "test_tokens_come_before_the_answer_ends"),
        ("drops the last token", "test_a_stop_token_ends_an_answer"),
        ("says nothing is cached", "test_a_prefix_is_computed_once"),
        ("hides evictions", "test_cached_tokens_are_what_the_events_said"),
        ("has hashes of its own", "test_stored_blocks_follow_their_parents"),
    ],
)
def test_faults_are_caught(fault, test):
    getattr(Suite(), test)()
    with pytest.raises(AssertionError):
        getattr(Suite(fault), test)()


def test_an_engine_that_answers_nothing_is_caught_within_the_time_limit():
    class Silent(Suite):
        time_limit_s = 0.2

        def make_engine(self, setup):
            engine = super().make_engine(setup)
            engine._bring = lambda delta: None
            return engine

    with pytest.raises(TimeoutError):
        Silent().test_an_answer_has_as_many_tokens_as_asked_for()


def test_a_claim_to_move_kv_is_checked():
    class Claims(MovableKvSuite, Suite):
        pass

    with pytest.raises(AssertionError, match="without KvPartialBlocks"):
        Claims().test_blocks_move_to_another_engine()


def test_a_share_that_tells_no_answers_apart_is_refused():
    with pytest.raises(TypeError, match=r"equal_tokens_share: must be between 0\.2 and 1, got 0\.1"):
        type("Lax", (EngineSuite,), {"equal_tokens_share": 0.1})


def test_answers_of_inexact_engines_are_told_apart():
    class Inexact(Suite):
        equal_tokens_share = 0.5

    Inexact().test_requests_do_not_disturb_each_other()
    answers = Inexact().answer(*(_request(seed) for seed in range(3)))
    with pytest.raises(AssertionError, match="of the tokens are equal"):
        Inexact().check_equal(
            answers, [*(answer.token_ids for answer in reversed(answers[:2])), answers[0].token_ids]
        )


def _request(seed):
    from penstock.testing.engines.probe import make_request

    return make_request(f"r{seed}", Suite().prompt(20, seed), max_tokens=20)
