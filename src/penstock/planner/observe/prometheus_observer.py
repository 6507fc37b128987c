"""Observes a deployment by Prometheus: what an `ObservationStream` gives, from scraped metrics."""

import asyncio
from collections.abc import Callable

from penstock.core.types.instances import Role
from penstock.planner.observe.observation import Observation, WorkerView
from penstock.planner.observe.prometheus import Instance, PrometheusSource
from penstock.planner.observe.stream import demand_of
from penstock.runtime.observations.windows import Digest

SOURCE = "prometheus"
"""The name that the observation has for the frontends."""
_SCRAPES = 2.5
"""A growing series tells its growth from two scrapes on."""


class PrometheusObserver:
    """One task owns it."""

    def __init__(
        self,
        source: PrometheusSource,
        *,
        scrape_s: float = 15.0,
        workers: Callable[[float], Observation] | None = None,
    ) -> None:
        """Ask nothing yet.

        Args:
            source: reads the server.
            scrape_s: its scrape interval; less than two and a half of them is never asked for.
            workers: gives what is known of workers; None: they are the instances of the metrics, which are aggregated.
        """
        self._source = source
        self._scrape_s = scrape_s
        self._workers = workers

    async def observe(self, seconds: float) -> Observation:
        """Give the demand of the last seconds, and the workers as they are now.

        Without one of the series, no frontend is named: a planner then changes nothing.

        Raises:
            Unavailable: the server does not answer, or refuses a query.
            ProtocolError: its answer is none of Prometheus' API.
        """
        seconds = max(seconds, _SCRAPES * self._scrape_s)
        now_s = asyncio.get_running_loop().time()
        if self._workers is not None:
            beside = self._workers(seconds)
            workers, silent = beside.workers, beside.silent
        else:
            found = await self._source.instances()
            workers, silent = tuple(_view(name, each) for name, each in found.items()), ()
        if not await self._source.is_scraped():
            return Observation(now_s, seconds, demand_of({}, set(), seconds), (), workers, silent)
        window = await self._source.read(seconds)
        demand = demand_of({SOURCE: [window]}, set(), seconds)
        return Observation(now_s, seconds, demand, (SOURCE,), workers, silent)


def _view(name: str, instance: Instance) -> WorkerView:
    """Describe an instance; Prometheus knows no step times, context and waits of it."""
    return WorkerView(
        name=name,
        role=Role.AGGREGATED,
        ready_s=instance.age_s,
        step_s=Digest(),
        prefilled_tokens_per_s=0.0,
        generated_tokens_per_s=0.0,
        running_requests=instance.running,
        waiting_requests=instance.waiting,
        queued_prefill_tokens=0,
        context_tokens=0,
        kv_usage=instance.kv_usage,
        oldest_wait_s=0.0,
    )
