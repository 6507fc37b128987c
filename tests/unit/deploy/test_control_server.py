"""The control channel against callers that send no request, and a deployment that fails at one."""

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.core.errors import PenstockError, RequestError
from penstock.core.types.instances import Role
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import LINE_BYTES_MAX, SOCKET_NAME, Deployment, Told
from penstock.deploy.control.server import ControlServer
from penstock.planner.act.memory_connector import MemoryConnector
from penstock.planner.observe.stream import ObservationStream


class BrokenConnector(MemoryConnector):
    async def scale(self, after=None):
        raise ZeroDivisionError("no workers")


@asynccontextmanager
async def served(connector):
    with tempfile.TemporaryDirectory() as directory:
        me = Deployment(name="suite", url="http://127.0.0.1:1", pid=1)
        async with ControlServer(connector, ObservationStream(), Path(directory), me):
            yield Path(directory, SOCKET_NAME)
        await connector.close()


async def answer_to(path, line):
    reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
    writer.write(line)
    answer = await reader.readline()
    assert await reader.read() == b"", "one answer, then the end"
    writer.close()
    return msgspec.json.decode(answer, type=Told)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\n", "no request of the control channel"),
        (b"\xff\xfe\n", "no request of the control channel"),
        (b"[" * 100_000 + b"\n", "no request of the control channel"),
        (b'{"version":1,"body":' + b'{"a":' * 100_000 + b"\n", "no request of the control channel"),
        (b'{"version":1,"body":{"type":"scale","after":1e400}}\n', "no request of the control channel"),
        (b'{"version":7,"body":{"type":"scale"}}\n', "version 1 of the control channel, got 7"),
        (b"x" * (LINE_BYTES_MAX + 2) + b"\n", "at most 1048576 bytes"),
    ],
    ids=["empty", "bytes", "deep", "deep body", "infinite", "version", "long"],
)
def test_what_is_no_request_gets_a_reason(line, says):
    async def main():
        async with served(MemoryConnector({Role.AGGREGATED: 1})) as path:
            told = await answer_to(path, line)
            assert says in told.error.message
            assert told.error.code == "protocol_error"
            assert (await LocalConnector(path).scale()).revision == 0

    asyncio.run(main())


@pytest.mark.parametrize("by", ["", "x" * 65, "a\nb", "\x1b[2J"])
def test_who_scales_has_a_name_that_can_be_shown(by):
    async def main():
        async with served(MemoryConnector({Role.AGGREGATED: 1})) as path:
            with pytest.raises(RequestError, match="1 to 64 printable characters"):
                await LocalConnector(path).add(Role.AGGREGATED, by=by)
            assert len((await LocalConnector(path).scale()).replicas) == 1

    asyncio.run(main())


def test_a_failure_of_the_deployment_is_answered():
    async def main():
        async with served(BrokenConnector({Role.AGGREGATED: 1})) as path:
            with pytest.raises(PenstockError, match=r"failed at this request: ZeroDivisionError") as caught:
                await LocalConnector(path).scale()
            assert caught.value.code == "internal_error"

    asyncio.run(main())
