"""Seeded attacks on a running `penstock serve` with a planner: killed and stopped processes."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

import aiohttp
import psutil

from penstock.core.errors import PenstockError
from penstock.core.types.instances import ReplicaState, Role, Scale
from penstock.deploy.control.local_connector import LocalConnector
from tests.support.streams import MODEL

KINDS = (
    "kill_ready", "kill_changing", "flip_and_kill", "retire_and_kill", "pause_worker", "pause_frontend",
    "pause_supervisor", "kill_frontend",
)  # fmt: skip
"""Methods of `Attack`."""


@dataclass(slots=True)
class Lost:
    """Streams that failed: `excused` those whose frontend may have been killed meanwhile."""

    told: list[str] = field(default_factory=list)
    excused: int = 0
    done: int = 0


class Attack:
    """Streams in several tasks beside faults of one seed."""

    def __init__(self, url: str, pid: int, connector: LocalConnector, *, seed: int) -> None:
        self.url, self.supervisor, self.connector = url, psutil.Process(pid), connector
        self.rng = random.Random(seed)
        self.lost = Lost()
        self.answers: dict[str, set[str]] = {}
        self.counts: dict[str, int] = {}
        self.killed: list[str] = []
        self.killed_frontends = 0
        self.kills_no_frontend = True
        self.ends = False

    # -- streams

    async def stream(self, session: aiohttp.ClientSession, prompt: str, tokens: int) -> None:
        """Run one greedy stream to its end, and note whether it was whole."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        before, text, usage = (self.killed_frontends if self.kills_no_frontend else -1), "", None
        try:
            async with session.post(f"{self.url}/v1/completions", json=body) as response:
                assert response.status == 200, f"{response.status} {await response.text()}"
                async for line in response.content:
                    data = line.removeprefix(b"data: ").strip()
                    if data.startswith(b"{"):
                        event = json.loads(data)
                        assert "error" not in event, str(event)
                        usage = event.get("usage") or usage
                        text += "".join(choice["text"] for choice in event["choices"])
            assert usage is not None, "the stream ended early"
            assert usage["completion_tokens"] == tokens, f"{usage} for {tokens} tokens"
        except (aiohttp.ClientError, AssertionError) as error:
            if self.killed_frontends > before:
                self.lost.excused += 1
            else:
                self.lost.told.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.2)
            return
        self.lost.done += 1
        self.answers.setdefault(f"{prompt}/{tokens}", set()).add(text)

    async def load(self, prompts: list[str], tokens: int) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:

            async def repeat(prompt: str) -> None:
                while not self.ends:
                    await self.stream(session, prompt, tokens)

            async with asyncio.TaskGroup() as group:
                for prompt in prompts:
                    group.create_task(repeat(prompt))

    # -- faults

    def pids(self) -> dict[str, int]:
        """Give the processes of the deployment by their names."""
        found = {}
        for process in self.supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found[process.name()] = process.pid
        return found

    def signal(self, name: str, number: signal.Signals) -> bool:
        pid = self.pids().get(name)
        if pid is None:
            return False
        if number is signal.SIGKILL:
            self.killed.append(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    async def faults(self, seconds: float, kinds: Sequence[str] = KINDS) -> None:
        """Do things that a machine or a person does, for so many seconds."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while loop.time() < end_s:
            await asyncio.sleep(self.rng.uniform(0.1, 1.0))
            kind = self.rng.choice(kinds)
            if await getattr(self, kind)():
                self.counts[kind] = self.counts.get(kind, 0) + 1

    async def chosen(self, *states: ReplicaState) -> str | None:
        """Choose a worker in one of these states, but none of the last two that answer."""
        scale: Scale = await self.connector.scale()
        answering = [
            each.name
            for each in scale.replicas
            if each.state is ReplicaState.READY and each.role is not Role.PREFILL
        ]
        found = [
            each.name
            for each in scale.replicas
            if each.state in states and (each.name not in answering or len(answering) > 1)
        ]
        return self.rng.choice(found) if found else None

    async def kill_ready(self) -> bool:
        name = await self.chosen(ReplicaState.READY)
        return name is not None and self.signal(name, signal.SIGKILL)

    async def kill_changing(self) -> bool:
        name = await self.chosen(ReplicaState.FLIPPING, ReplicaState.DRAINING, ReplicaState.STARTING)
        return name is not None and self.signal(name, signal.SIGKILL)

    async def flip_and_kill(self) -> bool:
        """Kill a worker at a random moment of a change of its role, which a person asked for."""
        scale = await self.connector.scale()
        ready = [each for each in scale.replicas if each.state is ReplicaState.READY]
        if len(ready) < 3:
            return False
        victim = self.rng.choice(ready)
        to = Role.DECODE if victim.role is Role.PREFILL else Role.PREFILL
        return await self._change_and_kill(victim.name, self.connector.flip(victim.name, to, by="a person"))

    async def retire_and_kill(self) -> bool:
        """Kill a worker at a random moment of its drain, which a person asked for."""
        name = await self.chosen(ReplicaState.READY)
        if name is None:
            return False
        return await self._change_and_kill(name, self.connector.retire([name], by="a person"))

    async def _change_and_kill(self, name: str, change: Coroutine[object, object, None]) -> bool:
        task = asyncio.create_task(change)
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        is_killed = self.signal(name, signal.SIGKILL)
        await asyncio.wait([task], timeout=60)
        if (error := task.exception()) is not None and not isinstance(error, PenstockError):
            raise error
        return is_killed

    async def pause_worker(self) -> bool:
        name = await self.chosen(ReplicaState.READY, ReplicaState.FLIPPING, ReplicaState.DRAINING)
        return name is not None and await self._pause(name)

    async def pause_frontend(self) -> bool:
        return await self._pause("frontend-1")

    async def pause_supervisor(self) -> bool:
        self.supervisor.suspend()
        await asyncio.sleep(self.rng.uniform(0.2, 3.0))
        self.supervisor.resume()
        return True

    async def kill_frontend(self) -> bool:
        self.killed_frontends += 1
        self.kills_no_frontend = False  # streams that begin meanwhile may reach it as well
        done = self.signal("frontend-2", signal.SIGKILL)
        await asyncio.sleep(0.5)
        self.kills_no_frontend = True
        return done

    async def _pause(self, name: str) -> bool:
        if not self.signal(name, signal.SIGSTOP):
            return False
        await asyncio.sleep(self.rng.uniform(0.2, 3.0))
        self.signal(name, signal.SIGCONT)
        return True
