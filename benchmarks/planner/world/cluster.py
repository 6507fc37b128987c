"""A simulated deployment that a planner scales: requests go to engines, windows to an observation stream."""

import asyncio
import heapq
from dataclasses import dataclass, field

import numpy as np

from benchmarks.planner.workload import Workload
from benchmarks.planner.world.engine import Engine, Prompt
from benchmarks.planner.world.step_times import GridTimes
from benchmarks.planner.world.tally import Tally
from penstock.core.errors import RequestError
from penstock.core.types.instances import Replica, ReplicaState, Role
from penstock.planner.memory_connector import MemoryConnector, TimedChanges
from penstock.planner.observation import Observation, ObservationStream

_TICK_S = 0.5
"""A worker's change counts from the next tick on."""
_WINDOW_TICKS = 2
_CROWD_S = 0.001
"""Between workers with equal waits, each open request counts so much."""
_AFTER_S = 900.0
_KEPT_S = 70.0
"""No strategy looks further back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the workers of a deployment are.

    times:            step times of one worker
    gpus:             GPUs of one worker
    kv_bytes_per_s:   bandwidth from a prefill worker to a decode worker
    """

    times: GridTimes
    gpus: int
    max_batch_tokens: int
    requests_max: int
    kv_bytes_per_token: float
    kv_bytes_per_s: float = 50e9
    workers_max: int = 64


@dataclass(slots=True, repr=False)
class Cluster:
    """Engines behind a `MemoryConnector`. One task runs it; event-loop time is its clock.

    can_flip: whether workers may change roles
    history:  each tick: GPUs of all workers, and workers of each role that do not drain
    """

    fleet: Fleet
    workload: Workload
    replicas: dict[Role, int]
    start_s: float
    can_flip: bool = True
    tally: Tally = field(init=False)
    connector: MemoryConnector = field(init=False)
    stream: ObservationStream = field(default_factory=lambda: ObservationStream(kept_s=_KEPT_S))
    gpu_s: float = 0.0
    flips: int = 0
    history: list[tuple[float, int, dict[Role, int]]] = field(default_factory=list)
    _engines: dict[str, Engine] = field(default_factory=dict)
    _drained: dict[str, Engine] = field(default_factory=dict)
    _flipping: dict[str, Engine] = field(default_factory=dict)
    _moves: list[tuple[float, int, float, Prompt]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally = Tally(self.workload.requests)
        self.connector = (MemoryConnector if self.can_flip else _WithoutFlips)(
            self.replicas,
            workers_max=self.fleet.workers_max,
            changes=TimedChanges(starts_s=self.start_s, drains_s=None, flips_s=0.1),
        )
        self.connector.on_state = self._note
        for role, count in self.replicas.items():
            for number in range(count):
                name = f"{role}-{number + 1}"
                self._engines[name] = self._make(name, role, 0.0)

    async def observe(self, seconds: float) -> Observation:
        """Add up the windows of the last `seconds`."""
        return self.stream.observe(seconds)

    async def serve(self) -> None:
        """Serve the whole workload; returns once every request has ended, or 15 minutes after the last arrival."""
        load = self.workload
        ends = np.searchsorted(load.at_s, np.arange(1, int(load.span_s / _TICK_S) + 2) * _TICK_S)
        first = ticks = 0
        while True:
            now_s = (ticks + 1) * _TICK_S
            await asyncio.sleep(now_s - asyncio.get_running_loop().time())
            last = int(ends[ticks]) if ticks < len(ends) else load.requests
            self._arrive(first, last)
            first = last
            self._advance(now_s)
            ticks += 1
            if now_s <= load.span_s:
                self._account(now_s)
            if ticks % _WINDOW_TICKS == 0:
                self._send_windows(now_s)
            done = self.tally.finished == load.requests
            if now_s > load.span_s and (done or now_s > load.span_s + _AFTER_S):
                return

    def _arrive(self, first: int, last: int) -> None:
        """Give requests to the workers where their first tokens are expected first."""
        load = self.workload
        if first == last:
            return
        rows = zip(
            range(first, last),
            load.at_s[first:last].tolist(),
            load.input_tokens[first:last].tolist(),
            load.output_tokens[first:last].tolist(),
            strict=True,
        )
        by_role = self._by_role()
        is_moved = bool(Role.PREFILL in by_role and Role.DECODE in by_role)
        takers = by_role.get(Role.AGGREGATED, [])
        if is_moved:
            takers = takers + by_role[Role.PREFILL]
        elif not takers:
            takers = by_role.get(Role.DECODE, []) or by_role.get(Role.PREFILL, [])
        for number, at_s, tokens, output in rows:
            ids = load.prefix_ids(number)
            best = takers[0]
            least = float("inf")
            for engine in takers:
                wait_s = engine.free_s - at_s
                score = (wait_s if wait_s > 0 else 0.0) + _CROWD_S * engine.open
                if ids:
                    score += engine.prompt_s(tokens, engine.cache.cached_tokens(ids, tokens))
                if score < least:
                    best, least = engine, score
            moved = is_moved and best.role is Role.PREFILL and output > 1
            self.tally.arrive(tokens)
            best.put(Prompt(number, tokens, output, moved, at_s, ids), at_s)

    def _advance(self, now_s: float) -> None:
        """Let every engine work until `now_s`: those that decode other workers' prompts last."""
        every = [*self._engines.values(), *self._flipping.values(), *self._drained.values()]
        by_role = self._by_role()
        takers = by_role.get(Role.DECODE) or by_role.get(Role.AGGREGATED, [])
        for engine in every:
            if engine.role is not Role.DECODE:
                engine.advance(now_s)
                self._move(engine)
        moves = self._moves
        while moves and moves[0][0] <= now_s and takers:
            arrives_s, _, first_s, prompt = heapq.heappop(moves)
            for engine in takers:
                engine.advance(arrives_s)
            best = min(takers, key=lambda engine: (engine.open, engine.context))
            best.decode(prompt, first_s, arrives_s)
        for engine in every:
            engine.advance(now_s)
            self._move(engine)
        for name, engine in list(self._drained.items()):
            if not engine.open and not engine.moved:
                del self._drained[name]
                self.connector.end(name)

    def _by_role(self) -> dict[Role, list[Engine]]:
        """Give the engines that take requests."""
        found: dict[Role, list[Engine]] = {}
        for engine in self._engines.values():
            found.setdefault(engine.role, []).append(engine)
        return found

    def _move(self, engine: Engine) -> None:
        """Send the KV of an engine's finished prompts."""
        fleet = self.fleet
        for at_s, prompt in engine.moved:
            arrives_s = at_s + prompt.tokens * fleet.kv_bytes_per_token / fleet.kv_bytes_per_s
            heapq.heappush(self._moves, (arrives_s, prompt.number, at_s, prompt))
        engine.moved.clear()

    def _account(self, now_s: float) -> None:
        counts: dict[Role, int] = {}
        every = self.connector.workers
        for replica in every:
            if replica.state is not ReplicaState.DRAINING:
                counts[replica.role] = counts.get(replica.role, 0) + 1
        self.gpu_s += _TICK_S * self.fleet.gpus * len(every)
        if not self.history or self.history[-1][1:] != (len(every), counts):
            self.history.append((now_s, len(every), counts))

    def _send_windows(self, now_s: float) -> None:
        seconds = _TICK_S * _WINDOW_TICKS
        self.stream.put("frontend-1", self.tally.window(seconds))
        for name, engine in self._engines.items():
            self.stream.put(name, engine.window(seconds, now_s))

    def _note(self, replica: Replica) -> None:
        """Follow a worker's change of state."""
        name, now_s = replica.name, asyncio.get_running_loop().time()
        if replica.state is ReplicaState.READY:
            engine = self._flipping.pop(name, None) or self._make(name, replica.role, now_s)
            if engine.role is not replica.role:
                self.flips += 1
                engine.role, engine.ready_s = replica.role, now_s
            self._engines[name] = engine
            return
        left = self._engines.pop(name, None) or self._flipping.pop(name, None)
        if left is None:
            return
        self.stream.forget(name)
        if replica.state is ReplicaState.FLIPPING:
            self._flipping[name] = left
        else:
            self._drained[name] = left

    def _make(self, name: str, role: Role, now_s: float) -> Engine:
        fleet = self.fleet
        return Engine(
            name,
            role,
            fleet.times,
            self.tally,
            fleet.max_batch_tokens,
            fleet.requests_max,
            ready_s=now_s,
            now_s=now_s,
        )


class _WithoutFlips(MemoryConnector):
    """Workers that keep the role that they started in."""

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        del by, revision
        raise RequestError(f"{name} keeps its role, and does not become {role}", http_status=409)
