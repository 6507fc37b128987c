"""The outbox against a model: every token of an open request comes out once, in order, within its credit."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.types.requests import Delta, FinishReason
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.runtime.requests.outbox import Outbox

NAMES = st.sampled_from("abc")


class OutboxMachine(RuleBasedStateMachine):
    @initialize(window=st.integers(0, 8), stream=st.integers(400, 1500), total=st.integers(600, 2500))
    def begin(self, window, stream, total):
        self.window = window
        self.aborted = set()
        self.box = Outbox(
            window_tokens=window, stream_bytes_max=stream, bytes_max=total, abort=self.aborted.add
        )
        self.pushed, self.came, self.credit, self.finished, self.ended = {}, {}, {}, set(), set()

    @rule(name=NAMES)
    def open(self, name):
        if name in self.ended:
            self.close(name)
        if name not in self.pushed:
            self.pushed[name], self.came[name], self.credit[name] = 0, [], self.window
        self.box.open(name)

    @rule(name=NAMES)
    def close(self, name):
        self.box.close(name)
        for state in (self.pushed, self.came, self.credit):
            state.pop(name, None)
        for names in (self.finished, self.ended, self.aborted):
            names.discard(name)

    @precondition(lambda self: self.pushed)
    @rule(
        steps=st.dictionaries(NAMES, st.tuples(st.integers(0, 120), st.booleans()), min_size=1),
        writable=st.booleans(),
    )
    def step(self, steps, writable):
        deltas = []
        for name, (count, last) in steps.items():
            if name not in self.pushed or name in self.finished:
                continue
            start = self.pushed[name]
            deltas.append(
                Delta(
                    request_id=name,
                    token_ids=pack_tokens(range(start, start + count)),
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
            self.pushed[name] += count
            if last:
                self.finished.add(name)
        out = self.box.offer(deltas, writable=writable)
        assert writable or not out
        self.take_out(out)

    @rule(name=NAMES, tokens=st.integers(-5, 200))
    def grant(self, name, tokens):
        self.box.grant(name, tokens)
        if name in self.credit and name not in self.ended:
            self.credit[name] += max(0, tokens)

    @rule(bytes_max=st.integers(1, 500))
    def take_a_part(self, bytes_max):
        self.take_out(self.box.take(bytes_max))

    @rule()
    def take(self):
        self.take_out(self.box.take())
        for name in self.pushed:
            waiting = name not in self.ended and self.pushed[name] > len(self.came[name])
            assert not waiting or self.credit[name] == 0, f"{name} has credit and tokens, and nothing came"

    def take_out(self, deltas):
        for delta in deltas:
            name = delta.request_id
            assert name not in self.ended, "nothing follows the last delta"
            tokens = unpack_tokens(delta.token_ids).tolist()
            if delta.error is not None:
                assert name in self.aborted, "parked: all that is left of what was held has come with it"
            self.came[name] += tokens
            self.credit[name] -= len(tokens)
            assert self.credit[name] >= 0, f"{name} got more than was granted"
            if delta.finish_reason is not None:
                self.ended.add(name)
                if delta.error is None:
                    assert len(self.came[name]) == self.pushed[name], "the finish comes last"

    @invariant()
    def nothing_is_lost_or_out_of_order(self):
        if hasattr(self, "box"):
            self.box.check()
            for came in self.came.values():
                assert came == list(range(len(came)))


TestOutbox = OutboxMachine.TestCase
TestOutbox.settings = settings(stateful_step_count=30)
