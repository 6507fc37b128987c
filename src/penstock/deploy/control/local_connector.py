"""Scales a deployment of this machine by its control channel."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.core.errors import ProtocolError, Unavailable, from_info
from penstock.core.types.instances import Role
from penstock.core.types.scaling import Scale
from penstock.deploy.control.messages import (
    CONTROL_VERSION,
    LINE_BYTES_MAX,
    Add,
    Ask,
    Deployment,
    Flip,
    GetObservation,
    GetScale,
    Retire,
    Told,
)
from penstock.planner.observe.observation import Observation

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_FLIP_S = 900.0  # the worker drains first


class LocalConnector:
    """A `seams.ScalingConnector`; each call has a connection of its own, so a restarted supervisor is no problem."""

    def __init__(self, path: Path) -> None:
        """Use the supervisor's socket at `path`; connects at each call."""
        self.deployment: Deployment | None = None
        """Who answered last."""
        self._path = path

    async def scale(self, after: int | None = None) -> Scale:
        told = await self._ask(GetScale(after=after))
        if told.scale is None:
            raise ProtocolError(f"{self._path}: the answer has no scale; use the penstock that started it")
        return told.scale

    async def observe(self, seconds: float) -> Observation:
        """Return what was seen of demand and workers in the last `seconds`; raises as `scale`."""
        told = await self._ask(GetObservation(seconds=seconds))
        if told.observation is None:
            raise ProtocolError(
                f"{self._path}: the answer has no observation; use the penstock that started it"
            )
        return told.observation

    async def add(
        self, role: Role, count: int = 1, *, by: str, revision: int | None = None
    ) -> tuple[str, ...]:
        return (await self._ask(Add(role=role, count=count, by=by, revision=revision))).names

    async def retire(self, names: Sequence[str], *, by: str, revision: int | None = None) -> None:
        await self._ask(Retire(names=tuple(names), by=by, revision=revision))

    async def flip(self, name: str, role: Role, *, by: str, revision: int | None = None) -> None:
        await self._ask(Flip(name=name, role=role, by=by, revision=revision), answer_s=_FLIP_S)

    async def close(self) -> None:
        """Do nothing: no connection stays open."""

    async def _ask(
        self, body: GetScale | GetObservation | Add | Retire | Flip, *, answer_s: float = _ANSWER_S
    ) -> Told:
        """Send one request and return its answer.

        Raises:
            Unavailable: nobody listens at the socket, or the supervisor ended before it answered.
            ProtocolError: the answer is of another version.
            PenstockError: as the supervisor said.
        """
        line = msgspec.json.encode(Ask(version=CONTROL_VERSION, body=body)) + b"\n"
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
            try:
                writer.write(line)
                async with asyncio.timeout(answer_s):
                    answer = await reader.readline()
            finally:
                writer.close()
        except (OSError, TimeoutError, ValueError) as error:
            reason = str(error) or f"no answer in {answer_s:g} s"
            raise Unavailable(f"{self._path}: no supervisor answers ({reason}); is it running?") from error
        if not answer.endswith(b"\n"):
            raise Unavailable(f"{self._path}: the supervisor ended before it answered; start it again")
        try:
            told = msgspec.json.decode(answer, type=Told)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._path}: no answer of the control channel: {error}") from error
        self.deployment = told.deployment
        if told.error is not None:
            raise from_info(told.error)
        return told
