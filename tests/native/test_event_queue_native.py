"""The native event queue of a loop on virtual time beside their Python reference."""

import contextvars
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.native import native
from penstock.sim.loop import EventQueuePython

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")
NUMBER = contextvars.ContextVar("number", default=0)


class Stuck(Exception):  # noqa: N818 - a state
    pass


def make(kind):
    """Give a queue of either kind that knows what to do in the end, and with errors."""

    class Told(kind):
        def __init__(self):
            super().__init__()
            self.errors = []

        def _stuck(self):
            raise Stuck

        def _failed(self, callback, error):
            assert callable(callback)
            self.errors.append((type(error), self.time()))

    return Told()


def both():
    return pytest.mark.parametrize(
        "kind", [EventQueuePython, native and native.EventQueue], ids=["python", "native"]
    )


DELAYS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 1e6])
DEEDS = st.recursive(
    st.one_of(
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.sampled_from(["stop", "raise", "forget", "crowd"])),
    ),
    lambda deeds: st.one_of(
        st.tuples(st.just("soon"), st.lists(deeds, max_size=3)),
        st.tuples(st.sampled_from(["at", "later"]), DELAYS, st.lists(deeds, max_size=3)),
    ),
    max_leaves=12,
)


class Script:
    """Does deeds, each calls' own when it is called, and notes what was called when."""

    def __init__(self, kind):
        self.queue = make(kind)
        self.handles = []
        self.notes = []

    def do(self, deeds):
        queue = self.queue
        for deed, *more in deeds:
            number = len(self.handles)
            match deed:
                case "soon":
                    self.handles.append(queue.call_soon(self.called, number, more[0]))
                case "at":
                    self.handles.append(queue.call_at(more[0], self.called, number, more[1]))
                case "later":
                    context = contextvars.copy_context()
                    context.run(NUMBER.set, -number)
                    self.handles.append(
                        queue.call_later(more[0], self.called, number, more[1], context=context)
                    )
                case "cancel" if self.handles:
                    self.handles[more[0] % len(self.handles)].cancel()
                case "crowd":
                    for _ in range(60):
                        queue.call_later(3.0, self.notes.append, "never").cancel()
                case "stop":
                    queue.stop_iterations()
                case "forget":
                    queue.forget_calls()
        if ("raise",) in deeds:
            raise ValueError

    def called(self, number, deeds):
        self.notes.append((number, NUMBER.get(), self.queue.time()))
        NUMBER.set(number)
        self.do(deeds)

    def run(self, rounds):
        for deeds in rounds:
            self.do([deed for deed in deeds if deed != ("raise",)])
            try:
                self.queue.run_iterations()
            except Stuck:
                self.notes.append("stuck")
            queue = self.queue
            self.notes.append((queue.time(), queue.num_timers, queue.cancelled_timers, len(queue.errors)))
        self.notes += [(handle.cancelled(), handle.when()) for handle in self.handles]
        return self.notes, self.queue.errors


@given(st.lists(st.lists(DEEDS, max_size=6), max_size=4))
def test_equal_calls_run_alike(rounds):
    assert Script(native.EventQueue).run(rounds) == Script(EventQueuePython).run(rounds)


@both()
def test_what_ends_a_process_ends_the_iterations_and_the_rest_waits(kind):
    def interrupt():
        raise KeyboardInterrupt

    queue, got = make(kind), []
    queue.call_soon(interrupt)
    queue.call_soon(got.append, 1)
    with pytest.raises(KeyboardInterrupt):
        queue.run_iterations()
    assert got == []
    with pytest.raises(Stuck):
        queue.run_iterations()
    assert got == [1]
    assert queue.errors == []


@both()
def test_a_call_that_cannot_be_made_is_refused(kind):
    queue = make(kind)
    for call in (
        queue.call_soon,
        lambda: queue.call_at(1.0),
        lambda: queue.call_at("soon", print),
        lambda: queue.call_soon(print, end=""),
    ):
        with pytest.raises(TypeError):
            (call(), queue.run_iterations())  # the reference finds out when it comes to it


@both()
def test_a_queue_that_nobody_has_any_more_goes_with_what_it_would_have_called(kind):
    class Caller:
        def call(self):
            raise AssertionError

    queue, caller = make(kind), Caller()
    caller.queue = queue
    caller.handles = [queue.call_later(1.0, caller.call), queue.call_soon(caller.call)]
    gone = weakref.ref(caller)
    del queue, caller
    gc.collect()
    assert gone() is None


@both()
def test_a_handle_lets_go_of_what_it_called_or_will_not_call(kind):
    class Argument:
        pass

    queue, called, cancelled = make(kind), Argument(), Argument()
    handles = [queue.call_soon(id, called), queue.call_later(1.0, id, cancelled)]
    gone = [weakref.ref(called), weakref.ref(cancelled)]
    del called, cancelled
    handles[1].cancel()
    with pytest.raises(Stuck):
        queue.run_iterations()
    assert [reference() for reference in gone] == [None, None]
    assert [handle.cancelled() for handle in handles] == [True, True]
