"""Transport `cuda` on real devices: within a process, and between two of them."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.testing.loop import run_async
from penstock.testing.peer_transport import PeerTransportSuite
from penstock.testing.transports.harness import TwoAgents
from penstock.transfer import PeerLost, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.transports.cuda.transport import CudaTransport

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
pytestmark = pytest.mark.slow


class DeviceBytes:
    """A tensor that the suite uses as if it were an array of bytes."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        return self.tensor.cpu().numpy()

    def __setitem__(self, at: slice, data: Any) -> None:
        self.tensor[at] = torch.from_numpy(np.ascontiguousarray(data))
        torch.cuda.synchronize()

    def copy(self) -> Any:
        return self.__array__().copy()

    def any(self) -> bool:
        return bool(self.__array__().any())


class OnDevices(TwoAgents):
    def __init__(self, size_bytes: int, devices: tuple[str, str]) -> None:
        self._devices = list(devices)
        super().__init__(lambda: [CudaTransport()], size_bytes=size_bytes)

    def make_memory(self) -> tuple[Any, object]:
        device = self._devices.pop(0) if self._devices else "cuda:0"
        tensor = torch.zeros(self.size_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        if device == "cpu":
            return tensor.numpy(), tensor
        return DeviceBytes(tensor), tensor


class TestWithinADevice(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return OnDevices(size_bytes, ("cuda:0", "cuda:0"))


class TestMemoryToDevice(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return OnDevices(size_bytes, ("cpu", "cuda:0"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device only")
class TestBetweenTwoDevices(PeerTransportSuite):
    @staticmethod
    def harness(size_bytes: int) -> TwoAgents:
        return OnDevices(size_bytes, ("cuda:0", "cuda:1"))


def test_device_memory_of_another_process_is_read_and_written_until_it_is_killed() -> None:
    script = Path(__file__).with_name("cuda_owner.py")
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        metadata = bytes.fromhex(owner.stdout.readline())

        async def scenario() -> None:
            config = TransferConfig(listen=("unix",))
            async with TransferAgent("reader", config, transports=[CudaTransport()]) as agent:
                peer = await agent.connect(metadata)
                remote = peer.region("kv")
                sent = np.random.default_rng(0).integers(0, 256, remote.size_bytes, np.uint8)
                back = torch.zeros(remote.size_bytes, dtype=torch.uint8, device="cuda:0")
                torch.cuda.synchronize()
                here, there = agent.register(sent), agent.register(back)
                await agent.post(TransferOp.WRITE, here.ranges(), remote.ranges(), peer, checksum=True).wait()
                await agent.post(TransferOp.READ, there.ranges(), remote.ranges(), peer, checksum=True).wait()
                assert np.array_equal(back.cpu().numpy(), sent)
                owner.kill()

                async def read_for_ever() -> None:
                    while True:
                        await agent.post(TransferOp.READ, there.ranges(), remote.ranges(), peer).wait()

                with pytest.raises(PeerLost):
                    await asyncio.wait_for(read_for_ever(), 5)

        try:
            run_async(scenario())
        finally:
            owner.kill()
