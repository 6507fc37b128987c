"""Several routers and one worker, in messages that take their time: what each sees of the others.

The worker's bookkeeping and the routers' are the real ones; the connections between them are queues.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.ids import RequestId
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.router.fleet.loads import LoadTracker, Reservation
from penstock.worker.frontends import Frontend, Frontends

ROUTERS = st.integers(0, 2)


@dataclass(eq=False)
class Router:
    """`up` and `down` are what is on its way to the worker and back; `open` its requests that have not ended."""

    frontend: Frontend
    loads: LoadTracker = field(default_factory=LoadTracker)
    up: deque[Request | RequestId] = field(default_factory=deque)
    down: deque[WorkerLoad] = field(default_factory=deque)
    open: dict[RequestId, Reservation] = field(default_factory=dict)


class PeersMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.worker = Frontends(lambda: 0.0)
        self.routers = [Router(self.worker.connect(object())) for _ in range(3)]
        self.names = 0
        for router in self.routers:
            self.worker_tells(router)

    def worker_tells(self, router: Router) -> None:
        load = WorkerLoad(running_requests=len(self.worker.requests))
        router.down.append(self.worker.load_for(router.frontend, load))

    @rule(index=ROUTERS, prompt=st.integers(1, 200), cached=st.integers(0, 250))
    def send(self, index, prompt, cached):
        router = self.routers[index]
        self.names += 1
        request = Request(
            request_id=RequestId(f"r{self.names}"),
            model="tiny",
            token_ids=pack_tokens(range(prompt)),
            sampling=SamplingParams(max_tokens=1),
            expected_cached_tokens=cached,
        )
        cached = min(cached, prompt - 1)
        router.open[request.request_id] = router.loads.reserve(0, prompt - cached, 1, cached)
        router.up.append(request)

    @rule(index=ROUTERS)
    def arrive(self, index):
        router = self.routers[index]
        if not router.up:
            return
        match router.up.popleft():
            case Request() as request:
                router.frontend.sent += 1
                self.worker.take(request, router.frontend)
            case name:
                self.worker.forget(name)

    @rule(index=ROUTERS)
    def tell(self, index):
        self.worker_tells(self.routers[index])

    @rule(index=ROUTERS)
    def hear(self, index):
        router = self.routers[index]
        if router.down:
            before = router.loads.peer_arrivals(0)
            load = router.down.popleft()
            arrivals = router.loads.report(0, load)
            assert arrivals == (0 if before is None else load.peer_arrivals - before)

    @precondition(lambda self: self.worker.requests)
    @rule(data=st.data())
    def first_token(self, data):
        name = data.draw(st.sampled_from(sorted(self.worker.requests)))
        running = self.worker.requests[name]
        self.worker.prefilled(running)
        for router in self.routers:
            if router.frontend is running.frontend and name in router.open:
                router.loads.prefill_done(router.open[name])

    @precondition(lambda self: any(router.open for router in self.routers))
    @rule(data=st.data())
    def end(self, data):
        router = data.draw(st.sampled_from([router for router in self.routers if router.open]))
        name = data.draw(st.sampled_from(sorted(router.open)))
        router.loads.release(router.open.pop(name))
        router.up.append(name)

    @rule(index=ROUTERS)
    def die_and_be_replaced(self, index):
        gone = self.worker.disconnect(self.routers[index].frontend.sink)
        assert gone is not None
        for name in tuple(gone.requests):
            self.worker.forget(name)
        self.routers[index] = router = Router(self.worker.connect(object()))
        self.worker_tells(router)

    @rule()
    def quiet(self):
        """Let everything arrive: what a router knows of itself and of its peers is then the truth."""
        for index, router in enumerate(self.routers):
            while router.up:
                self.arrive(index)
        for router in self.routers:
            self.worker_tells(router)
        for index, router in enumerate(self.routers):
            while router.down:
                self.hear(index)
        left = [r.prefill for r in self.worker.requests.values() if r.prefill is not None]
        for router in self.routers:
            loads = router.loads
            assert loads.running_requests[0] == len(self.worker.requests)
            assert loads.own_requests[0] + loads.peer_requests[0] == len(self.worker.requests)
            assert loads.own_prefill_tokens[0] + loads.peer_prefill_tokens[0] == sum(p.tokens for p in left)
            assert loads.own_prefill_pairs[0] + loads.peer_prefill_pairs[0] == sum(p.pairs for p in left)

    @invariant()
    def parts_agree(self):
        if not hasattr(self, "worker"):
            return
        self.worker.check()
        for router in self.routers:
            router.loads.check()
            told = router.loads.load(0)
            if told is not None:  # its own are never among its peers'
                assert told.peer_requests <= told.running_requests
                assert router.loads.peer_requests[0] == told.peer_requests

    def teardown(self):
        if hasattr(self, "worker"):
            for router in self.routers:
                for name in tuple(router.open):
                    router.loads.release(router.open.pop(name))
                    router.up.append(name)
            self.quiet()
            assert all(num == 0 for router in self.routers for num in router.loads.peer_requests)


TestPeersMachine = PeersMachine.TestCase
TestPeersMachine.settings = settings(stateful_step_count=40)
