"""The operator: leads, watches, and reconciles one graph after another."""

import asyncio
import os
import random
import signal
import socket
from collections import OrderedDict
from collections.abc import Coroutine
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from penstock.core.errors import Unavailable
from penstock.core.log import cause, get_logger
from penstock.deploy.operator.cache import ClusterCache
from penstock.deploy.operator.http import OperatorHttp, OperatorMetrics
from penstock.deploy.operator.leadership import Leadership
from penstock.deploy.operator.reconciler import Reconciler
from penstock.runtime.kubernetes import KubernetesAccess, KubernetesClient, Pace

_PAUSE_S, _PAUSE_S_MAX = 0.5, 300.0


class WorkQueue:
    """A queue of names, at most one entry each. One event loop owns it."""

    def __init__(
        self, rng: random.Random, *, pause_s: float = _PAUSE_S, pause_s_max: float = _PAUSE_S_MAX
    ) -> None:
        """Be empty; `rng` gives jitter to pauses between `pause_s` and `pause_s_max`."""
        self._rng = rng
        self._pause_s, self._pause_s_max = pause_s, pause_s_max
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Count the names that may be worked on now."""
        return len(self._ready)

    def add(self, name: str) -> None:
        """Have a name worked on soon: once, however often it is added before that."""
        timer = self._waiting.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._ready[name] = None
        self._changed.set()

    async def take(self) -> str:
        """Wait for a name and take it."""
        while not self._ready:
            self._changed.clear()
            await self._changed.wait()
        name, _ = self._ready.popitem(last=False)
        return name

    def done(self, name: str, *, again_s: float | None = None) -> None:
        """Note that work on a name succeeded; have it worked on again after `again_s`."""
        self._failures.pop(name, None)
        if again_s is not None:
            self._later(name, again_s)

    def failures(self, name: str) -> int:
        """Count how often in a row work on a name has failed."""
        return self._failures.get(name, 0)

    def failed(self, name: str, *, least_s: float = 0.0) -> float:
        """Have a name worked on again after a pause of `least_s` or more, in which `add` may come first; returns the pause in seconds."""
        count = self._failures[name] = self._failures.get(name, 0) + 1
        longest_s: float = min(self._pause_s * 2 ** min(count - 1, 16), self._pause_s_max)
        pause_s = max(longest_s * self._rng.uniform(0.5, 1.0), least_s)
        self._later(name, pause_s)
        return pause_s

    def close(self) -> None:
        """Forget all."""
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        self._ready.clear()

    def _later(self, name: str, seconds: float) -> None:
        if name in self._ready:
            return
        timer = self._waiting.pop(name, None)
        if timer is not None:
            timer.cancel()
        self._waiting[name] = asyncio.get_running_loop().call_later(seconds, self.add, name)


_CALL_S = 10.0
_RESYNC_S = 600.0
_FAILURES_SAID = 4
"""So many in a row, within about 8 s, are said in the graph's status: fewer pass by themselves."""
_log = get_logger()


class Operator:
    """Operates the PenstockGraphs of one namespace. One event loop owns it."""

    def __init__(
        self,
        access: KubernetesAccess,
        *,
        rng: random.Random,
        identity: str | None = None,
        lease_s: float = 15.0,
        pace: Pace | None = None,
        resync_s: float = _RESYNC_S,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            access: the API server; its namespace is operated.
            rng: for jitter.
            identity: of this process among operators; None is the host's name and a random number.
            lease_s: a leader that is silent for so long is replaced.
            pace: of watches.
            resync_s: every graph is applied again so often, whatever watches told.
            registry: of metrics; None for one of its own.
        """
        self._metrics = OperatorMetrics(registry or CollectorRegistry())
        self._client = KubernetesClient(access, timeout_s=_CALL_S)
        self._rng = rng
        self._identity = identity or f"{socket.gethostname()}-{os.getpid()}-{rng.getrandbits(32):08x}"
        self._leadership = Leadership(self._client, self._identity, duration_s=lease_s, rng=rng)
        self._pace = pace or Pace(probe_s=30.0, retry_s=0.2, retry_s_max=10.0)
        self._resync_s = resync_s
        self._is_blind = False
        """It leads, and has not seen all objects yet."""

    async def run(self) -> None:
        """Wait for the lead, and operate while this process has it, until cancelled."""
        async with self._client:
            await self._leadership.run(self._operate)

    def is_ready(self) -> bool:
        """Whether the API server has answered lately, and shown all that is to be operated where this process leads."""
        return self._leadership.has_answered() and not self._is_blind

    async def _operate(self) -> None:
        queue = WorkQueue(self._rng)
        cache = ClusterCache(self._client, queue.add, pace=self._pace, rng=self._rng)
        reconciler = Reconciler(self._client, cache)
        metrics = self._metrics
        metrics.queued.set_function(lambda: len(queue))
        metrics.graphs.set_function(lambda: len(cache.graphs.objects))
        due_s: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                metrics.leads.set(1)
                self._is_blind = True
                group.create_task(cache.run())
                await cache.synced()
                self._is_blind = False
                _log.info(
                    "operator_started", namespace=self._client.namespace, graphs=len(cache.graphs.objects)
                )
                while True:
                    name = await queue.take()
                    is_full = loop.time() >= due_s.get(name, 0.0)
                    if is_full:
                        due_s[name] = loop.time() + self._resync_s * self._rng.uniform(0.8, 1.0)
                    try:
                        with metrics.seconds.time():
                            await reconciler.reconcile(name, is_full=is_full)
                    except Unavailable as error:
                        metrics.reconciles.labels("failed").inc()
                        pause_s = queue.failed(name, least_s=error.retry_after_s or 0.0)
                        _log.warning(
                            "graph_not_reconciled", graph=name, error=error.message, retry_s=round(pause_s, 1)
                        )
                        if queue.failures(name) >= _FAILURES_SAID:
                            await self._say(name, reconciler.say_failed(name, error))
                        continue
                    except Exception as error:  # noqa: BLE001 - one graph must not end the operator of all
                        metrics.reconciles.labels("crashed").inc()
                        pause_s = queue.failed(name)
                        _log.error("graph_crashed", graph=name, retry_s=round(pause_s, 1), **cause(error))
                        await self._say(name, reconciler.say_crashed(name, error))
                        continue
                    metrics.reconciles.labels("done").inc()
                    if name not in cache.graphs.objects:
                        due_s.pop(name, None)
                        queue.done(name)
                        continue
                    queue.done(name, again_s=max(0.0, due_s[name] - loop.time()))
        finally:
            metrics.leads.set(0)
            self._is_blind = False
            for gauge in (metrics.queued, metrics.graphs):
                gauge.set_function(lambda: 0)  # what another operator sees now
            queue.close()

    async def _say(self, name: str, saying: Coroutine[None, None, None]) -> None:
        try:
            await saying
        except Exception as second:  # noqa: BLE001 - as above; the log has said it
            _log.warning("status_not_written", graph=name, **cause(second))


async def run_operator(access: KubernetesAccess, *, lease_s: float, listen: str | None) -> None:
    """Operate until SIGTERM or SIGINT, and give up the lead then, so that another operator goes on at once.

    Args:
        access: the API server; its namespace is operated.
        lease_s: a leader that is silent for so long is replaced.
        listen: `tcp://HOST:PORT` of probes and metrics; None for none.

    Raises:
        ConfigError: `listen` is no address, or cannot be listened on.
    """
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    registry = CollectorRegistry()
    operator = Operator(access, rng=random.Random(), lease_s=lease_s, registry=registry)
    async with AsyncExitStack() as stack:
        if listen is not None:
            http = await stack.enter_async_context(OperatorHttp(listen, registry, operator.is_ready))
            _log.info("operator_listening", port=http.port)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        running = group.create_task(operator.run())
        stopped = group.create_task(stopping.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        stopped.cancel()
