"""One simulated worker: prompts in chunks beside decoding, step by step; steps without prompts are summed up."""

import heapq
from collections import deque
from dataclasses import dataclass, field

from benchmarks.planner.world.prefix_cache import PrefixCache
from benchmarks.planner.world.step_times import GridTimes
from benchmarks.planner.world.tally import Tally
from penstock.core.types.instances import Role
from penstock.runtime.observations import Digest, WorkerWindow
from penstock.sim.trace import PREFIX_BLOCK_TOKENS

_CHUNKS_MAX = 16


@dataclass(slots=True)
class Prompt:
    """A request; `is_moved` if another worker decodes it.

    ids:     prefix ids of its whole blocks; none where another worker has computed it
    cached:  tokens that were in the prefix cache of the worker that computed it
    done:    tokens whose KV there is, cached ones included
    """

    number: int
    tokens: int
    output: int
    is_moved: bool
    at_s: float
    ids: tuple[int, ...] = ()
    cached: int = 0
    done: int = 0

    @property
    def reusable(self) -> int:
        """Tokens that it adds to the prefix cache."""
        return max(0, len(self.ids) * PREFIX_BLOCK_TOKENS - self.cached)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the worker may come to need for it alone."""
        if self.is_moved:
            return self.tokens - self.cached
        return self.tokens + self.output - (self.cached if self.ids else 0)


@dataclass(slots=True)
class Engine:
    """A worker's batch. `now_s` is the end of its last step; a step that has begun is not interrupted.

    times:            step times
    max_batch_tokens: most tokens of a step
    requests_max:     most requests in the batch
    moved:            finished prompts of other workers' streams, with the time: the cluster takes them
    """

    name: str
    role: Role
    times: GridTimes
    tally: Tally
    max_batch_tokens: int
    requests_max: int
    ready_s: float = 0.0
    now_s: float = 0.0
    free_s: float = 0.0
    """When the prompts so far are expected to be done."""
    moved: list[tuple[float, Prompt]] = field(default_factory=list)
    waiting: deque[Prompt] = field(default_factory=deque)
    streams: list[tuple[int, int, float, Prompt]] = field(default_factory=list)
    """Heap: step at which the stream ends, its number, the time of its first token."""
    held_back: deque[tuple[Prompt, float]] = field(default_factory=deque)
    """Streams of other workers' prompts that find no room, and their first tokens."""
    open: int = 0
    """Requests that wait or run."""
    step: int = 0
    context: int = 0
    held: int = 0
    """KV tokens that running requests may come to need, beside cached ones."""
    cached_held: int = 0
    """Those of `held` that the prefix cache has too."""
    cache: PrefixCache = field(default_factory=PrefixCache)
    queued_tokens: int = 0
    prefilled: int = 0
    generated: int = 0
    step_buckets: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    steps_s: float = 0.0
    _running: list[Prompt] = field(default_factory=list)

    def put(self, prompt: Prompt, at_s: float) -> None:
        """Take a request at `at_s`."""
        self.advance(at_s)
        prompt.cached = prompt.done = self.cache.cached_tokens(prompt.ids, prompt.tokens)
        self.cache.use(prompt.ids[: prompt.cached // PREFIX_BLOCK_TOKENS])
        self.waiting.append(prompt)
        self.open += 1
        self.queued_tokens += prompt.tokens - prompt.cached
        self.free_s = max(self.free_s, at_s) + self.prompt_s(prompt.tokens, prompt.cached)

    def prompt_s(self, tokens: int, cached: int) -> float:
        """Give the seconds of a prompt alone."""
        return self.times.prompts_s(1, tokens - cached, cached, 0, 0)

    def decode(self, prompt: Prompt, first_s: float, at_s: float) -> None:
        """Take a stream whose KV comes at `at_s`; it waits while the KV is full."""
        self.advance(at_s)
        prompt.is_moved, prompt.ids = False, ()
        self.held_back.append((prompt, first_s))
        self.open += 1
        self._take()

    def advance(self, until_s: float) -> None:
        """Run the steps that begin before `until_s`."""
        while self.now_s < until_s:
            if self.waiting or self._running:
                self._mixed(until_s)
            elif self.streams:
                self._decode(until_s)
            else:
                self.now_s = until_s

    def window(self, seconds: float, at_s: float) -> WorkerWindow:
        """Give what was done since the last window."""
        oldest = self._running[0] if self._running else self.waiting[0] if self.waiting else None
        capacity = self.times.kv_capacity_tokens
        found = WorkerWindow(
            seconds=seconds,
            role=self.role,
            ready_s=at_s - self.ready_s,
            step_s=Digest(count=self.steps, total=self.steps_s, buckets=self.step_buckets),
            prefilled_tokens=self.prefilled,
            generated_tokens=self.generated,
            running_requests=len(self.streams) + len(self._running),
            waiting_requests=len(self.waiting),
            queued_prefill_tokens=self.queued_tokens,
            context_tokens=self.context,
            active_blocks=min(self.held, capacity),
            total_blocks=capacity,
            oldest_wait_s=max(0.0, at_s - oldest.at_s) if oldest else 0.0,
        )
        self.step_buckets = {}
        self.steps = self.prefilled = self.generated = 0
        self.steps_s = 0.0
        return found

    def _admit(self) -> None:
        """Move prompts from the queue into the batch, as far as KV and bounds allow."""
        capacity = self.times.kv_capacity_tokens
        running, streams = self._running, self.streams
        while self.waiting and len(running) < _CHUNKS_MAX:
            first = self.waiting[0]
            need = first.kv_tokens
            busy = bool(streams or running)
            if busy and (self.held + need > capacity or len(streams) + len(running) >= self.requests_max):
                return
            self.held += need
            running.append(self.waiting.popleft())
            self._shrink_cache()

    def _shrink_cache(self) -> None:
        if self.cache:
            self.cache.shrink(self.times.kv_capacity_tokens - self.held + self.cached_held)

    def _mixed(self, until_s: float) -> None:
        self._admit()
        batch = len(self.streams)
        running = self._running
        if not running:
            self._decode(until_s)  # until streams leave
            return
        left = max(self.max_batch_tokens - batch, 1)
        count = new = cached = finished = 0
        for prompt in running:
            chunk = min(left, prompt.tokens - prompt.done)
            count += 1
            new += chunk
            cached += prompt.done
            prompt.done += chunk
            left -= chunk
            finished += prompt.done == prompt.tokens
            if not left:
                break
        step_s = self.times.prompts_s(count, new // count, cached // count, batch, self.context)
        self._pass(1, step_s)
        self.prefilled += new
        self.queued_tokens -= new
        if finished:
            self._running = running[finished:]
            for prompt in running[:finished]:
                self.tally.first_token(prompt.number, prompt.at_s, self.now_s)
                self.held -= prompt.kv_tokens
                self.cache.use(prompt.ids)
                if prompt.is_moved:
                    self.open -= 1
                    self.moved.append((self.now_s, prompt))
                else:
                    self._begin(prompt, self.now_s)

    def _decode(self, until_s: float) -> None:
        batch = len(self.streams)
        most = self.streams[0][0] - self.step
        step_s = self.times.decode_step_s(batch, self.context)
        steps = min(most, int((until_s - self.now_s) / step_s) + 1)
        if steps > 1:
            step_s = self.times.decode_step_s(batch, self.context + batch * steps // 2)
        self._pass(steps, step_s)

    def _pass(self, steps: int, step_s: float) -> None:
        """Let `steps` steps pass; streams that end with the last one leave."""
        batch = len(self.streams)
        self.now_s += steps * step_s
        self.step += steps
        self.context += steps * batch
        self.generated += steps * batch
        self.steps += steps
        self.steps_s += steps * step_s
        bucket = self.times.bucket(step_s)
        self.step_buckets[bucket] = self.step_buckets.get(bucket, 0) + steps
        streams = self.streams
        if not streams or streams[0][0] > self.step:
            return
        while streams and streams[0][0] <= self.step:
            _, _, first_s, prompt = heapq.heappop(streams)
            self.context -= prompt.tokens + prompt.output
            self.held -= prompt.kv_tokens
            self.cached_held -= prompt.reusable
            self._finish(prompt, first_s)
        if self.held_back:
            self._take()

    def _take(self) -> None:
        """Begin the streams that find room."""
        capacity = self.times.kv_capacity_tokens
        while self.held_back:
            prompt, first_s = self.held_back[0]
            need = prompt.kv_tokens
            full = self.held + need > capacity or len(self.streams) >= self.requests_max
            if self.streams and full:
                return
            self.held_back.popleft()
            self._begin(prompt, first_s)

    def _begin(self, prompt: Prompt, first_s: float) -> None:
        """Decode a request after its first token."""
        if prompt.output <= 1:
            self._finish(prompt, first_s)
            return
        self.held += prompt.kv_tokens
        self.cached_held += prompt.reusable
        self.context += prompt.tokens + 1
        heapq.heappush(self.streams, (self.step + prompt.output - 1, prompt.number, first_s, prompt))

    def _finish(self, prompt: Prompt, first_s: float) -> None:
        self.open -= 1
        self.tally.finish(prompt.number, prompt.output, prompt.cached, first_s, self.now_s)
