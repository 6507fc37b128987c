"""Planted bugs, one at a time: the chaos suite has to catch each of them, or it proves nothing.

Each is a context manager that breaks one method of the real code while it is open.
"""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any
from unittest import mock

import msgspec

from penstock.core.framing import Pong
from penstock.core.types.events import BlockRemoved, BlockStored, Tier
from penstock.core.wire import NO_TOKENS
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.kv.loader import Loader
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.router.dispatch.attempt import DirectTokens
from penstock.router.dispatch.open_request import OpenRequest
from penstock.router.dispatch.progress import Progress
from penstock.router.fleet.connector import Connector, MemberSink
from penstock.router.fleet.loads import LoadTracker
from penstock.router.radix import RadixTree
from penstock.router.request_queue import RequestQueue
from penstock.router.retries import MigrationPace, PoisonIsolation
from penstock.runtime.events.publisher import EventPublisher
from penstock.runtime.events.subscriber import EventSubscriber
from penstock.runtime.requests.direct_deltas import DirectDeltas
from penstock.seams import WrittenTokens
from penstock.worker.frontends import Frontends
from penstock.worker.worker import Worker
from tests.support.chaos import Mutants

MUTANTS = Mutants()
mutant = MUTANTS.plant


def replaced(owner: type, name: str, method: Callable[..., Any]) -> Any:
    return mock.patch.object(owner, name, method)


def every(number: int) -> Callable[[], bool]:
    """Say yes to every call of this number."""
    calls = count(1)
    return lambda: next(calls) % number == 0


@mutant
def dropped_token() -> Iterator[None]:
    """Every 40th step of a worker loses its first delta on the way out."""
    original, is_lost = Worker._on_step, every(40)

    def on_step(self, step):
        if is_lost():
            step = msgspec.structs.replace(step, deltas=step.deltas[1:])
        original(self, step)

    with replaced(Worker, "_on_step", on_step):
        yield


@mutant
def double_delivery() -> Iterator[None]:
    """Every 50th frame is given to its readers twice."""
    original, is_double = MemberSink.push, every(50)

    def push(self, worker_id, deltas):
        original(self, worker_id, deltas)
        if is_double():
            original(self, worker_id, deltas)

    with replaced(MemberSink, "push", push):
        yield


@mutant
def repeated_tokens_after_a_move() -> Iterator[None]:
    """A request that moves starts again from its prompt."""

    with replaced(Progress, "request", lambda self: self._request):
        yield


@mutant
def leaked_reservation() -> Iterator[None]:
    """A request that ends before its worker's report covers it stays reserved."""

    def release(self, reservation):
        if reservation.open:
            reservation.open = False
            own = (1, reservation.prefill_tokens, reservation.prefill_pairs, reservation.blocks)
            self._table[-4:, reservation.slot] -= own

    with replaced(LoadTracker, "release", release):
        yield


@mutant
def leaked_reservation_of_a_peer() -> Iterator[None]:
    """A worker goes on telling routers of another's request that ended before its first token."""
    original = Frontends.forget

    def forget(self, request_id):
        running = self.requests.get(request_id)
        if running is not None:
            running.prefill = None
        return original(self, request_id)

    with replaced(Frontends, "forget", forget):
        yield


@mutant
def reservation_of_a_peer_reported_late() -> Iterator[None]:
    """What is told of other routers' requests is only ever taken upwards."""
    original = LoadTracker.report

    def report(self, slot, load):
        before = self._accounts[slot].load
        if before is not None:
            most = max(before.peer_requests, load.peer_requests)
            load = msgspec.structs.replace(load, peer_requests=most)
        return original(self, slot, load)

    with replaced(LoadTracker, "report", report):
        yield


@mutant
def lost_event_without_resync() -> Iterator[None]:
    """A gap in the events is passed over."""

    def on_batch(self, batch):
        if self.sequence is not None and batch.sequence > self.sequence:
            self.sequence = batch.sequence
            self._apply(self._connection.worker_id, batch.events)
            self._settle()

    with replaced(EventSubscriber, "_on_batch", on_batch):
        yield


@mutant
def block_not_released_on_abort() -> Iterator[None]:
    """A request that is aborted during a step keeps its slot's blocks."""

    with replaced(Scheduler, "_vacate_aborted", lambda self: self._aborted_slots.clear()):
        yield


@mutant
def block_kept_after_a_request() -> Iterator[None]:
    """The last block of every request is forgotten when its blocks are given back."""
    original = BlockPool.release

    def release(self, block_ids):
        original(self, block_ids[:-1] if len(block_ids) > 8 else block_ids)

    with replaced(BlockPool, "release", release):
        yield


@mutant
def deadline_ignored() -> Iterator[None]:
    """Nobody's clock ends a request."""

    def nothing(*_args):
        return None

    with (
        replaced(OpenRequest, "_expire", nothing),
        replaced(Worker, "_expire", nothing),
    ):
        yield


@mutant
def forgotten_prefix_removal() -> Iterator[None]:
    """The router never hears that a block was evicted."""
    with replaced(RadixTree, "remove", lambda *_args, **_kwargs: None):
        yield


@mutant
def prefixes_of_a_lost_worker_kept() -> Iterator[None]:
    """A lost worker's blocks stay in the index."""
    original = Connector._detach

    def detach(self, member, error):
        with mock.patch.object(self._indexer, "forget"):
            original(self, member, error)

    with replaced(Connector, "_detach", detach):
        yield


@mutant
def eviction_without_event() -> Iterator[None]:
    """An engine does not tell which cached blocks it gave up."""
    original = BlockPool.take_events

    def take_events(self):
        return tuple(event for event in original(self) if not isinstance(event, BlockRemoved))

    with replaced(BlockPool, "take_events", take_events):
        yield


@mutant
def stored_in_part() -> Iterator[None]:
    """A worker tells only of the first block of each run."""
    original = EventPublisher.publish

    def publish(self, events):
        shorter = tuple(
            msgspec.structs.replace(e, block_hashes=e.block_hashes[:8]) if isinstance(e, BlockStored) else e
            for e in events
        )
        original(self, shorter)

    with replaced(EventPublisher, "publish", publish):
        yield


@mutant
def credit_lost() -> Iterator[None]:
    """A reader's grants are never sent, so that a stream stands still after its window."""

    def take(self, progress):
        return progress.take()

    with replaced(OpenRequest, "_take", take):
        yield


@mutant
def requests_of_a_gone_frontend_kept() -> Iterator[None]:
    """A worker goes on with what a frontend had asked for that is gone."""

    def disconnected(self, sink):
        self._frontends.disconnect(sink)

    with replaced(Worker, "disconnected", disconnected):
        yield


@mutant
def lost_worker_not_noticed() -> Iterator[None]:
    """The end of a connection is not told to the requests on it."""

    def lost(self, worker_id, error):
        self.ended = True

    with replaced(MemberSink, "lost", lost):
        yield


@mutant
def held_request_forgotten() -> Iterator[None]:
    """Every fifth turn of those that wait, nobody is told."""
    original, is_forgotten = RequestQueue._tell, every(5)

    def tell(self, ticket):
        if not is_forgotten():
            original(self, ticket)

    with replaced(RequestQueue, "_tell", tell):
        yield


@mutant
def turn_not_given_back() -> Iterator[None]:
    """Who was told to go and left keeps all others from going."""
    original = RequestQueue.leave

    def leave(self, ticket):
        if not ticket.released:
            original(self, ticket)

    with replaced(RequestQueue, "leave", leave):
        yield


@mutant
def lost_request_not_aborted() -> Iterator[None]:
    """Every third request whose worker was lost gets no time to go on."""
    original, is_lost = MigrationPace.depart, every(3)

    def depart(self, now_s):
        return float("inf") if is_lost() else original(self, now_s)

    with replaced(MigrationPace, "depart", depart):
        yield


@mutant
def lost_request_expected_for_ever() -> Iterator[None]:
    """Every tenth that was about to move stays expected, and has others go too soon."""
    original, is_expected = MigrationPace.expect, every(10)

    def expect(self, change):
        if not is_expected() or change > 0:
            original(self, change)

    with replaced(MigrationPace, "expect", expect):
        yield


@mutant
def suspect_never_cleared() -> Iterator[None]:
    """Who went on with no other suspect beside it and does well keeps its place."""
    with replaced(PoisonIsolation, "leave", lambda self, suspect: self._waiting.pop(suspect, None)):
        yield


@mutant
def host_content_untold() -> Iterator[None]:
    """What goes to the host is told to nobody."""
    original = KvManager.with_events

    def with_events(self, events):
        told = original(self, events)
        return tuple(event for event in told if getattr(event, "tier", None) is not Tier.HOST)

    with replaced(KvManager, "with_events", with_events):
        yield


@mutant
def load_never_over() -> Iterator[None]:
    """The blocks of a load stay held by it."""
    original = Loader._on_done

    def on_done(self, prefix, run, count):
        self._pool.acquire(prefix.targets)
        self._held.update(prefix.targets)
        original(self, prefix, run, count)

    with replaced(Loader, "_on_done", on_done):
        yield


@mutant
def direct_tokens_uncounted() -> Iterator[None]:
    """What was written by the rule is not known to be there when the request goes on elsewhere."""
    with replaced(Progress, "wrote", lambda self, token_ids: None):
        yield


def closing(change: Callable[[WrittenTokens], WrittenTokens | None]) -> Any:
    """Change what a connection says of a direct stream that is closed."""
    original = DirectDeltas.close

    def close(self, request_id):
        taken = original(self, request_id)
        return None if taken is None else change(taken)

    return replaced(DirectDeltas, "close", close)


@mutant
def direct_tokens_that_wait_are_lost() -> Iterator[None]:
    """Tokens that came by the rule in this turn are not read when it ends."""
    with closing(lambda taken: taken._replace(waiting=NO_TOKENS)):
        yield


@mutant
def direct_tokens_are_read_again() -> Iterator[None]:
    """Tokens that were written are unread once more where others wait."""
    with closing(lambda taken: taken._replace(waiting=taken.written) if taken.waiting else taken):
        yield


@mutant
def direct_tokens_ungranted_at_the_end() -> Iterator[None]:
    """A direct stream's last tokens are never granted, so that a stream that often leaves the rule stands still."""
    with closing(lambda taken: taken._replace(ungranted=0)):
        yield


@mutant
def direct_grants_lost() -> Iterator[None]:
    """Tokens are written and not granted."""
    original = DirectDeltas.__init__

    def init(self, grant_tokens, written):
        original(self, grant_tokens, lambda tokens, _grants: written(tokens, ()))

    with replaced(DirectDeltas, "__init__", init):
        yield


@mutant
def direct_stream_overtaken() -> Iterator[None]:
    """A delta for the reader does not wait for the tokens before it."""
    original = OpenRequest.on_delta

    def on_delta(self, delta):
        with mock.patch.object(DirectTokens, "close"):
            original(self, delta)

    with replaced(OpenRequest, "on_delta", on_delta):
        yield


@mutant
def direct_stream_left_open() -> Iterator[None]:
    """A request that ends leaves its direct stream behind."""
    original = OpenRequest._leave

    def leave(self):
        with mock.patch.object(DirectTokens, "close"):
            original(self)

    with replaced(OpenRequest, "_leave", leave):
        yield


@mutant
def frame_taken_apart_wrongly() -> Iterator[None]:
    """Every 50th frame with direct tokens loses what it has beside them."""
    original, is_cut = DirectDeltas.decode, every(50)

    def decode(self, payload):
        message = original(self, payload)
        return Pong() if is_cut() else message

    with replaced(DirectDeltas, "decode", decode):
        yield


TIERED = frozenset({"host_content_untold", "load_never_over"})
"""Those that show only where hosts hold what devices gave up."""
DIRECT = frozenset(
    {"direct_tokens_that_wait_are_lost", "direct_tokens_are_read_again", "direct_stream_overtaken"}
)
"""Those that show where several steps arrive in one turn."""
CROWDED = frozenset({"leaked_reservation"})
"""Those that show best where many requests come within the time of a report."""
HOLDING = frozenset({"held_request_forgotten", "turn_not_given_back"})
"""Those that show only where routers hold requests."""
STEPS_FAIL = frozenset(
    {"suspect_never_cleared", "lost_request_not_aborted", "lost_request_expected_for_ever"}
)
"""Those that show only where many steps fail."""
