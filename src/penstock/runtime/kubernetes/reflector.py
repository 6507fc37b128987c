"""Follows the objects of one kind: list, watch from there, go on after a cut, list again after 410 Gone."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.runtime.kubernetes.client import KubernetesClient, KubernetesError, Object, Resource

_WATCH_S = 300
_RELIST = {400, 410, 504}
"""Answers to a watch from a resourceVersion that the server does not have any more, or not yet as after a restored backup."""
_CUTS_TOLD = 3
"""A warning says so after so many watches that ended at once."""
_CUT_FIX = (
    "let proxies before the API server keep responses open for minutes; changes are seen late meanwhile"
)
_log = get_logger()


class Follower(Protocol):
    """Takes what a reflector sees, in its order."""

    def listed(self, objects: list[Object]) -> None:
        """Take all objects that there are; what is not among them is gone."""
        ...

    def put(self, body: Object) -> None:
        """Take an object that is new or has changed."""
        ...

    def deleted(self, body: Object) -> None:
        """Take the last state of an object that is gone, or no longer chosen by the selector."""
        ...

    def connected(self) -> None:
        """Note that the server answers, after a list or a cut."""
        ...

    def lost(self, error: Unavailable) -> None:
        """Note that it does not; called again for each try."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a reflector, in seconds.

    Attributes:
        probe_s: a server is asked something so often, since the watch of one that hangs is silent.
        retry_s: the first pause after an error; doubles up to `retry_s_max`. A watch that lasts less than that counts as an error.
    """

    probe_s: float
    retry_s: float
    retry_s_max: float


class Reflector:
    """Follows one kind of objects. One event loop owns it."""

    def __init__(
        self,
        client: KubernetesClient,
        resource: Resource,
        labels: str,
        follower: Follower,
        *,
        pace: Pace,
        rng: random.Random,
    ) -> None:
        """Follow nothing yet; `labels` is a label selector, `rng` gives jitter."""
        self._client = client
        self._resource = resource
        self._labels = labels
        self._follower = follower
        self._pace = pace
        self._rng = rng
        self._revision: str | None = None
        self._is_connected = False
        self._watching: asyncio.Timeout | None = None
        self._silence: Unavailable | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe())
            await self._keep_following()

    async def _keep_following(self) -> None:
        tries, loop = 0, asyncio.get_running_loop()
        while True:
            self._is_connected = False
            begun_s = loop.time()
            error: Unavailable | None = None
            try:
                async with asyncio.timeout(None) as self._watching:
                    await self._follow()
            except TimeoutError:
                error = self._silence
            except Unavailable as caught:
                error = caught
            if self._is_connected and loop.time() - begun_s >= self._pace.retry_s_max:
                tries = 0
            self._is_connected = False
            if error is None:  # the server ends each watch after a while; a proxy may do so at once
                if loop.time() - begun_s < self._pace.retry_s_max:
                    tries += 1
                    if tries == _CUTS_TOLD:
                        _log.warning("watches_cut_short", kind=self._resource.kind, fix=_CUT_FIX)
                    await asyncio.sleep(self._delay_s(tries, None))
                continue
            if isinstance(error, KubernetesError) and error.status in _RELIST:
                self._revision = None
                if tries == 0:  # at once, the first time
                    tries = 1
                    continue
            self._follower.lost(error)
            tries += 1
            await asyncio.sleep(self._delay_s(tries, error.retry_after_s))

    async def _follow(self) -> None:
        """List unless it is known from where to go on, and watch until the server ends that."""
        if self._revision is None:
            listing = await self._client.list(self._resource, self._labels)
            self._revision = listing.revision
            self._follower.listed(listing.objects)
        seconds = self._rng.randint(_WATCH_S, 2 * _WATCH_S)
        events = self._client.watch(self._resource, self._labels, self._revision, seconds=seconds)
        async with aclosing(events):
            async for event in events:
                if event is None:
                    self._is_connected = True
                    self._follower.connected()
                    continue
                if event.type == "DELETED":
                    self._follower.deleted(event.object)
                elif event.type in {"ADDED", "MODIFIED"}:
                    self._follower.put(event.object)
                self._revision = event.object["metadata"]["resourceVersion"]

    async def _probe(self) -> None:
        """Ask the server now and then, and end a watch whose server does not answer."""
        while True:
            await asyncio.sleep(self._pace.probe_s)
            try:
                await self._client.list(self._resource, self._labels, limit=1)
            except KubernetesError:
                continue  # it answers; a watch says by itself what is wrong
            except Unavailable as error:
                if self._is_connected and self._watching is not None:
                    self._silence = error
                    self._watching.reschedule(asyncio.get_running_loop().time())

    def _delay_s(self, tries: int, wanted_s: float | None) -> float:
        longest_s: float = min(self._pace.retry_s * 2 ** min(tries, 16), self._pace.retry_s_max)
        return max(longest_s * self._rng.uniform(0.5, 1.0), wanted_s or 0.0)
