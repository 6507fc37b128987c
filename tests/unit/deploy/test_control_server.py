"""The control channel against callers that send no request, and a deployment that fails at one."""

import asyncio
import socket
import tempfile
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import Overloaded, PenstockError, RequestError
from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import LINE_BYTES_MAX, SOCKET_NAME, ControlAnswer, RunningDeployment
from penstock.deploy.control.server import ControlServer
from penstock.planner.memory_connector import MemoryConnector
from penstock.planner.observation import ObservationStream


class BrokenConnector(MemoryConnector):
    async def scale(self, after=None):
        raise ZeroDivisionError("no workers")


class WaitingConnector(MemoryConnector):
    """Holds callers that wait for a change; `waiting` counts them."""

    def __init__(self, replicas):
        super().__init__(replicas)
        self.waiting = 0
        self.all_there, self.go_on = asyncio.Event(), asyncio.Event()

    async def scale(self, after=None):
        if after is not None:
            self.waiting += 1
            if self.waiting == CALLERS_MAX:
                self.all_there.set()
            await self.go_on.wait()
        return await super().scale()


CALLERS_MAX = 64


@asynccontextmanager
async def served(connector):
    with tempfile.TemporaryDirectory() as directory:
        me = RunningDeployment(name="suite", url="http://127.0.0.1:1", pid=1)
        async with ControlServer(connector, ObservationStream(), Path(directory), me):
            yield Path(directory, SOCKET_NAME)
        await connector.close()


async def answer_to(path, line):
    reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
    writer.write(line)
    answer = await reader.readline()
    assert await reader.read() == b"", "one answer, then the end"
    writer.close()
    return msgspec.json.decode(answer, type=ControlAnswer)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\xff\xfe\n", "no request of the control channel"),
        (b'{"version":1,"body":' + b'{"a":' * 100_000 + b"\n", "no request of the control channel"),
        (b'{"version":1,"body":{"type":"scale","after":1e400}}\n', "no request of the control channel"),
        (b'{"version":7,"body":{"type":"scale"}}\n', "version 1 of the control channel, got 7"),
        (b"x" * (LINE_BYTES_MAX + 2) + b"\n", "at most 1048576 bytes"),
    ],
    ids=["bytes", "deep body", "infinite", "version", "long"],
)
async def test_what_is_no_request_gets_a_reason(line, says):
    async with served(MemoryConnector({Role.AGGREGATED: 1})) as path:
        told = await answer_to(path, line)
        assert says in told.error.message
        assert told.error.code == "protocol_error"
        assert (await LocalConnector(path).scale()).revision == 0


@pytest.mark.parametrize("by", ["", "x" * 65, "a\nb", "\x1b[2J"])
async def test_who_scales_has_a_name_that_can_be_shown(by):
    async with served(MemoryConnector({Role.AGGREGATED: 1})) as path:
        with pytest.raises(RequestError, match="1 to 64 printable characters"):
            await LocalConnector(path).add(Role.AGGREGATED, by=by)
        assert len((await LocalConnector(path).scale()).replicas) == 1


async def test_a_failure_of_the_deployment_is_answered():
    async with served(BrokenConnector({Role.AGGREGATED: 1})) as path:
        with pytest.raises(PenstockError, match=r"failed at this request: ZeroDivisionError") as caught:
            await LocalConnector(path).scale()
        assert caught.value.code == "internal_error"


HALF = b'{"version":1,"body":{"type":"sca'


async def half_open(path, count):
    """Open connections and send half of a request on each."""
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(HALF)
        writers.append(writer)
    return writers


async def test_callers_without_a_whole_request_keep_nobody_out():
    async with served(MemoryConnector({Role.AGGREGATED: 1})) as path:
        first, first_writer = await asyncio.open_unix_connection(path)
        first_writer.write(HALF)
        writers = [first_writer, *await half_open(path, 3 * CALLERS_MAX)]
        assert len((await LocalConnector(path, entry_s=0).scale()).replicas) == 1
        told = msgspec.json.decode(await first.readline(), type=ControlAnswer)
        assert told.error.code == "overloaded"
        assert "64 callers came after this one, whose request was not whole" in told.error.message
        for writer in writers:
            writer.close()


async def test_a_caller_beyond_those_that_are_obeyed_learns_why_or_gets_in():
    connector = WaitingConnector({Role.AGGREGATED: 1})
    async with served(connector) as path, asyncio.TaskGroup() as group:
        for _ in range(CALLERS_MAX):
            group.create_task(LocalConnector(path, entry_s=60).scale(after=0))
        await connector.all_there.wait()
        with pytest.raises(Overloaded, match="64 callers control this deployment already; end one"):
            await LocalConnector(path, entry_s=0).scale()
        late = group.create_task(LocalConnector(path, entry_s=60).add(Role.AGGREGATED, by="test"))
        await asyncio.sleep(0)
        connector.go_on.set()
        await late
        assert len((await LocalConnector(path).scale()).replicas) == 2, "added once"


@contextmanager
def listening():
    """Listen as a supervisor whose answers are the test's."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = Path(directory, SOCKET_NAME)
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        yield listener, path


async def close_without_reading(listener, answer):
    """Take a connection, answer before its request is read, and close: the caller's kernel calls that a reset."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    with connection:
        readable = asyncio.Event()
        loop.add_reader(connection, readable.set)
        await readable.wait()
        loop.remove_reader(connection)
        connection.sendall(answer)


REFUSAL = msgspec.json.encode(ControlAnswer(error=Overloaded("64 callers are there").to_info())) + b"\n"


@pytest.mark.parametrize("refusal", [b"", REFUSAL])
async def test_a_request_that_was_closed_unread_is_sent_again(refusal):
    with listening() as (listener, path):
        loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(LocalConnector(path).add(Role.AGGREGATED, by="test"))
        await close_without_reading(listener, refusal)
        connection, _ = await loop.sock_accept(listener)
        with connection:
            assert b'"add"' in await loop.sock_recv(connection, 1 << 16)
            connection.sendall(msgspec.json.encode(ControlAnswer(names=("worker-2",))) + b"\n")
            assert await asked == ("worker-2",)
