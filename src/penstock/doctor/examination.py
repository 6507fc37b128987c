"""Tries every transport between every two memories: within this process, and with another one."""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from penstock import __version__
from penstock.core.errors import PenstockError, TransferRefused
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
from penstock.doctor.memories import PROCESS_KINDS, STORAGE_KINDS, Memories
from penstock.doctor.neighbour import NETWORKED, neighbour
from penstock.doctor.probe import Figures, measure
from penstock.seams import Storage, Transport
from penstock.transfer import MemoryKind, Peer, Registration, RemoteRegion, TransferAgent, TransferConfig
from penstock.transfer.default_transports import default_transports

Remote = Registration | RemoteRegion


@dataclass(frozen=True, slots=True)
class _Way:
    """An agent that has one transport, and another one's memory or its own."""

    transport: str
    agent: TransferAgent
    place: str
    peer: Peer | None = None

    def found(self, local: Registration, remote: Remote, figures: Figures) -> PathFinding:
        """Say what two memories give."""
        refused = self.refused(local, remote, "")
        return msgspec.structs.replace(
            refused,
            read_gb_per_s=figures.read_gb_per_s,
            write_gb_per_s=figures.write_gb_per_s,
            latency_us=figures.latency_us,
        )

    def refused(self, local: Registration, remote: Remote, why: str) -> PathFinding:
        """Say why two memories give nothing."""
        return PathFinding(
            transport=self.transport,
            place=self.place,
            local=local.info.kind.value,
            remote=remote.info.kind.value,
            refusal=why,
        )


class Examination:
    """One run: what it has found so far."""

    def __init__(self, memories: Memories, others: Mapping[str, bytes]) -> None:
        """Know what there is.

        Args:
            memories: of this process.
            others: metadata of agents of another process, by place.
        """
        self.transports: list[TransportFinding] = []
        self.paths: list[PathFinding] = []
        self.problems: list[str] = []
        self._memories = memories
        self._others = others

    async def try_transport(self, transport: Transport | Storage) -> None:
        """Find out what one transport does here."""
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
                await self._try_place(_Way(name, agent, OWN), local, refusals)
                place = LOOPBACK if name in NETWORKED else PROCESS
                if place in self._others:
                    await self._try_other(_Way(name, agent, place), local, refusals)
        self.transports.append(TransportFinding(name=name, refusals=refusals))

    async def _try_other(
        self, way: _Way, local: Mapping[MemoryKind, Registration], refusals: dict[str, str]
    ) -> None:
        """Connect to the other process, and try that."""
        try:
            peer = await way.agent.connect(self._others[way.place])
        except PenstockError as error:
            refusals[way.place] = error.message
            self.problems.append(f"{way.transport}, {way.place}: {error.message}")
            return
        if way.transport in peer.unreachable:
            refusals[way.place] = peer.unreachable[way.transport]
        else:
            await self._try_place(replace(way, peer=peer), local, refusals)

    async def _try_place(
        self, way: _Way, local: Mapping[MemoryKind, Registration], refusals: dict[str, str]
    ) -> None:
        """Try all pairs of memories there. Where none works for one and the same reason, that is said once."""
        found = [await self._try_pair(way, *pair) for pair in _pairs(local, way.peer)]
        reasons = {path.refusal for path in found}
        if len(reasons) == 1 and (reason := reasons.pop()):
            refusals[way.place] = reason
        else:
            self.paths.extend(found)

    async def _try_pair(self, way: _Way, local: Registration, remote: Remote) -> PathFinding:
        try:
            return way.found(local, remote, await measure(way.agent, local, remote, way.peer))
        except TransferRefused as error:
            return way.refused(local, remote, _reason(way.transport, error.message) or error.message)
        except PenstockError as error:
            kinds = f"{local.info.kind.value} and {remote.info.kind.value}"
            self.problems.append(f"{way.transport}, {kinds}, {way.place}: {error.message}")
            return way.refused(local, remote, error.message)


async def examine(
    directory: Path,
    transports: Callable[[TransferConfig], Iterable[Transport | Storage]] = default_transports,
) -> Findings:
    """Try everything.

    Args:
        directory: an empty one; what is written there is to be removed by the caller.
        transports: makes what is to be tried.
    """
    problems: list[str] = []
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
                except Exception as error:  # noqa: BLE001 - the others are still to be tried
                    problems.append(f"{transport.name}: {_worded(error)}")
        return Findings(
            version=__version__,
            machine=f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
            memories=tuple(
                MemoryFinding(kind=kind.value, missing=memories.missing.get(kind, "")) for kind in MemoryKind
            ),
            transports=tuple(run.transports),
            paths=tuple(run.paths),
            host=inspect_host(),
            problems=(*problems, *run.problems),
        )


def _pairs(
    local: Mapping[MemoryKind, Registration], peer: Peer | None
) -> Iterator[tuple[Registration, Remote]]:
    """Pair this agent's memory with a peer's; or with its own, each two once, and with storage."""
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
    """Word what no transport should raise."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"


def _reason(transport: str, message: str) -> str:
    """Find what a transport itself says at the end of an agent's message, "" if it says nothing."""
    if message.endswith(")"):
        return message.removesuffix(")").partition(f"({transport}: ")[2]
    return message.partition(f": {transport}: ")[2]
