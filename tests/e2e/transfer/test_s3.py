"""Transport `object` on a real S3 server over HTTP, which fails, hangs and dies."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest
from s3_server import S3Server, proxy_of

from penstock.core.errors import DeadlineExceeded, TransferError, TransferRefused
from penstock.testing.loop import run_async
from penstock.testing.transports.harness import OwnStorage
from penstock.testing.transports.transport import TransportSuite
from penstock.transfer import ObjectRegion, Registration, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.storage.object import ObjectStorage

pytestmark = pytest.mark.slow

MIB = 1 << 20
READ, WRITE = TransferOp.READ, TransferOp.WRITE


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.kill()


def _region(
    url: str, *, size_bytes: int = 3 * MIB, prefix: str = "kv", bucket: str = "bucket"
) -> ObjectRegion:
    options = {
        "endpoint": url,
        "region": "us-east-1",
        "access_key_id": "any",
        "secret_access_key": "secret-of-the-test",
    }
    return ObjectRegion(f"s3://{bucket}/sub", size_bytes, prefix=prefix, object_bytes=MIB, options=options)


class _Storing:
    """An agent with memory and a region."""

    def __init__(self, agent: TransferAgent, memory: np.ndarray, region: ObjectRegion) -> None:
        self.agent = agent
        self.memory = memory
        self.local: Registration = agent.register(memory)
        self.remote: Registration = agent.register(region)

    async def move(self, op: TransferOp, *, timeout_s: float | None = None) -> None:
        await self.agent.post(op, self.local.ranges(), self.remote.ranges(), timeout_s=timeout_s).wait()


@asynccontextmanager
async def _storing(
    region: ObjectRegion, *, request_timeout_s: float = 10, retries: int = 3
) -> AsyncIterator[_Storing]:
    transport = ObjectStorage(requests=4, request_timeout_s=request_timeout_s, retries=retries)
    async with TransferAgent("a", TransferConfig(listen=()), transports=[transport]) as agent:
        memory = np.random.default_rng(1).integers(0, 256, region.size_bytes, np.uint8)
        yield _Storing(agent, memory, region)


@pytest.mark.nightly
class TestObjectTransportOnS3(TransportSuite):
    size_bytes = 5 << 19
    large_bytes = 12 << 20
    server: ClassVar[S3Server]

    @pytest.fixture(autouse=True)
    def _on_server(self, s3: S3Server) -> None:
        type(self).server = s3

    @staticmethod
    def harness(size_bytes: int) -> OwnStorage:
        transport = ObjectStorage(requests=4, request_timeout_s=20, retries=3)
        region = _region(
            TestObjectTransportOnS3.server.url, size_bytes=size_bytes, prefix=f"suite{size_bytes}"
        )
        return OwnStorage(transport, region)


async def test_errors_of_the_server_are_tried_again_for_a_while(s3: S3Server) -> None:
    async with proxy_of(s3) as front, _storing(_region(front.url, prefix="busy")) as storing:
        front.fail_next, front.drop_next = 2, 1
        await storing.move(WRITE)
        front.fail_next = 2
        await storing.move(READ)
        assert len(front.seen) == 3 + 3 + 3 + 2
        front.fail_next = 1000
        with pytest.raises(
            TransferError,
            match=r"putting \d+ bytes to s3://bucket/sub/busy/0000000\d: .*503 .*after 3 retries|503",
        ) as caught:
            await storing.move(WRITE)
        assert "secret-of-the-test" not in str(caught.value)
        assert 1000 - front.fail_next <= 3 * 4


async def test_a_server_that_hangs_is_an_error_in_time(s3: S3Server) -> None:
    async with (
        proxy_of(s3) as front,
        _storing(_region(front.url, prefix="hung"), request_timeout_s=0.5) as storing,
    ):
        front.hang = True
        for op in (WRITE, READ):
            async with asyncio.timeout(10):
                with pytest.raises(TransferError, match="s3://bucket/sub/hung/0000000"):
                    await storing.move(op)


async def test_a_read_waits_for_nothing_once_its_deadline_is_over(s3: S3Server) -> None:
    async with (
        proxy_of(s3) as front,
        _storing(_region(front.url, prefix="hung"), request_timeout_s=25) as storing,
    ):
        front.hang = True
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineExceeded):
                await storing.move(READ, timeout_s=0.1)


def test_a_server_that_dies_under_way_is_an_error_and_may_come_back() -> None:
    server = S3Server()

    async def main() -> None:
        async with _storing(_region(server.url, size_bytes=24 * MIB), retries=1) as storing:
            server.process.send_signal(signal.SIGSTOP)
            handle = storing.agent.post(WRITE, storing.local.ranges(), storing.remote.ranges())
            await asyncio.sleep(0.2)
            server.kill()
            with pytest.raises(TransferError, match="s3://bucket/sub/kv/0000"):
                await handle.wait()
            await asyncio.to_thread(server.start)
            await storing.move(WRITE)
            await storing.move(READ)

    try:
        run_async(main())
    finally:
        server.kill()


async def test_a_bucket_that_is_not_there_is_refused(s3: S3Server) -> None:
    async with _storing(_region(s3.url, bucket="nowhere")) as storing:
        for op in (READ, WRITE):
            with pytest.raises(TransferRefused, match=r"s3://nowhere/sub/kv/0000000.*NoSuchBucket"):
                await storing.move(op)
