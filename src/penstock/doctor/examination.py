"""Tests every transport between every pair of memories, within this process and with another one."""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from penstock import __version__
from penstock.core.errors import PenstockError, TransferRefused
from penstock.doctor.engines import find_gpus, gpu_finding, inspect_engines
from penstock.doctor.findings import (
    LOOPBACK,
    OWN,
    PROCESS,
    Findings,
    MemoryFinding,
    PathFinding,
    TransportFinding,
)
from penstock.doctor.host import inspect_host
from penstock.doctor.transfers import (
    NETWORKED,
    PROCESS_KINDS,
    STORAGE_KINDS,
    Figures,
    Memories,
    measure,
    neighbour,
)
from penstock.seams import Storage, Transport
from penstock.transfer import MemoryKind, Peer, Registration, RemoteRegion, TransferAgent, TransferConfig
from penstock.transfer.default_transports import default_transports

Remote = Registration | RemoteRegion


@dataclass(frozen=True, slots=True)
class _Route:
    """An agent with one transport, and the memory it reaches: its own or a peer's."""

    transport: str
    agent: TransferAgent
    place: str
    peer: Peer | None = None

    def found(self, local: Registration, remote: Remote, figures: Figures) -> PathFinding:
        """Make the finding of a working pair of memories."""
        refused = self.refused(local, remote, "")
        return msgspec.structs.replace(
            refused,
            read_gb_per_s=figures.read_gb_per_s,
            write_gb_per_s=figures.write_gb_per_s,
            latency_us=figures.latency_us,
        )

    def refused(self, local: Registration, remote: Remote, why: str) -> PathFinding:
        """Make the finding of a pair that does not work."""
        return PathFinding(
            transport=self.transport,
            place=self.place,
            local=local.info.kind.value,
            remote=remote.info.kind.value,
            refusal=why,
        )


class Examination:
    """The findings of one run."""

    def __init__(self, memories: Memories, others: Mapping[str, bytes]) -> None:
        """Create an examination.

        Args:
            memories: memories of this process.
            others: agent metadata of the other process, by place.
        """
        self.transports: list[TransportFinding] = []
        self.paths: list[PathFinding] = []
        self.problems: list[str] = []
        self._memories = memories
        self._others = others

    async def try_transport(self, transport: Transport | Storage) -> None:
        """Test one transport."""
        name = transport.name
        async with TransferAgent("doctor", transports=[transport]) as agent:
            if name in agent.unavailable:
                refusals = {OWN: agent.unavailable[name]}
            else:
                local, unregistered = self._memories.register(agent)
                refusals = {
                    f"{OWN}, {kind.value}": why
                    for kind, message in unregistered.items()
                    if (why := _reason(name, message))
                }
                await self._try_place(_Route(name, agent, OWN), local, refusals)
                place = LOOPBACK if name in NETWORKED else PROCESS
                if place in self._others:
                    await self._try_other(_Route(name, agent, place), local, refusals)
        self.transports.append(TransportFinding(name=name, refusals=refusals))

    async def _try_other(
        self, route: _Route, local: Mapping[MemoryKind, Registration], refusals: dict[str, str]
    ) -> None:
        """Connect to the other process and test it."""
        try:
            peer = await route.agent.connect(self._others[route.place])
        except PenstockError as error:
            refusals[route.place] = error.message
            self.problems.append(f"{route.transport}, {route.place}: {error.message}")
            return
        if route.transport in peer.unreachable:
            refusals[route.place] = peer.unreachable[route.transport]
        else:
            await self._try_place(replace(route, peer=peer), local, refusals)

    async def _try_place(
        self, route: _Route, local: Mapping[MemoryKind, Registration], refusals: dict[str, str]
    ) -> None:
        """Test all pairs of memories at a place. If all fail for one reason, report it once."""
        found = [await self._try_pair(route, *pair) for pair in _pairs(local, route.peer)]
        reasons = {path.refusal for path in found}
        if len(reasons) == 1 and (reason := reasons.pop()):
            refusals[route.place] = reason
        else:
            self.paths.extend(found)

    async def _try_pair(self, route: _Route, local: Registration, remote: Remote) -> PathFinding:
        try:
            return route.found(local, remote, await measure(route.agent, local, remote, route.peer))
        except TransferRefused as error:
            return route.refused(local, remote, _reason(route.transport, error.message) or error.message)
        except PenstockError as error:
            kinds = f"{local.info.kind.value} and {remote.info.kind.value}"
            self.problems.append(f"{route.transport}, {kinds}, {route.place}: {error.message}")
            return route.refused(local, remote, error.message)


async def examine(
    directory: Path,
    transports: Callable[[TransferConfig], Iterable[Transport | Storage]] = default_transports,
) -> Findings:
    """Run all tests.

    Args:
        directory: an empty directory; the caller removes its files.
        transports: makes the transports to test.
    """
    problems: list[str] = []
    gpus = find_gpus()
    with Memories(directory) as memories:
        async with AsyncExitStack() as stack:
            others: Mapping[str, bytes] = {}
            try:
                others = await stack.enter_async_context(neighbour())
            except PenstockError as error:
                problems.append(error.message)
            run = Examination(memories, others)
            for transport in transports(TransferConfig()):
                try:
                    await run.try_transport(transport)
                except Exception as error:  # noqa: BLE001 - go on with the next transport
                    problems.append(f"{transport.name}: {_worded(error)}")
        return Findings(
            version=__version__,
            machine=f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
            memories=tuple(
                MemoryFinding(kind=kind.value, missing=memories.missing.get(kind, "")) for kind in MemoryKind
            ),
            transports=tuple(run.transports),
            paths=tuple(run.paths),
            host=(gpu_finding(gpus), *inspect_host()),
            problems=(*problems, *run.problems),
            engines=inspect_engines(gpus),
        )


def _pairs(
    local: Mapping[MemoryKind, Registration], peer: Peer | None
) -> Iterator[tuple[Registration, Remote]]:
    """Yield pairs of this agent's memory with a peer's; without a peer, each pair of its own memory, and storage."""
    ours = [kind for kind in PROCESS_KINDS if kind in local]
    if peer is not None:
        theirs = peer.regions
        yield from (
            (local[kind], theirs[other.value])
            for kind in ours
            for other in PROCESS_KINDS
            if other.value in theirs
        )
        return
    for index, kind in enumerate(ours):
        yield from (
            (local[kind], local[other]) for other in (*ours[index:], *STORAGE_KINDS) if other in local
        )


def _worded(error: Exception) -> str:
    """Format an unexpected error of a transport."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _reason(transport: str, message: str) -> str:
    """Extract a transport's own reason from the end of an agent's message; "" without one."""
    if message.endswith(")"):
        return message.removesuffix(")").partition(f"({transport}: ")[2]
    return message.partition(f": {transport}: ")[2]
