"""The suite of KV tiers, and what is the host tier's own."""

import numpy as np
import obstore
import pytest

from penstock.core.descriptors import MemoryKind, Region
from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.types.kv import KvLayout
from penstock.kv.block_store import Namespace
from penstock.kv.device_blocks import DeviceBlocks
from penstock.kv.host_tier import HostTier
from penstock.kv.load_or_compute import MeasuredSpeed
from penstock.kv.object_packs import ObjectPacks
from penstock.kv.pack_index import PacksConfig
from penstock.kv.slot_file import SlotFile
from penstock.kv.stored_tier import StoredTier
from penstock.testing.kv_tier import KvTierSuite
from tests.support.shared_host import SharedHost
from tests.support.slots import NAMESPACE

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", element_bytes=4, block_size=4)


class TestHostTier(KvTierSuite):
    def make_tier(self, device, block_size):
        return HostTier(device, 32, block_size)


class TestSharedHostTier(KvTierSuite):
    """A part of an arena that another worker, without blocks, shares."""

    @pytest.fixture(autouse=True)
    def _share(self):
        self.host = SharedHost()

    def make_tier(self, device, block_size):
        self.other = self.host.worker(1)
        return HostTier(device, 32, block_size, part=self.host.part(0), namespace=NAMESPACE)


class TestDiskTier(KvTierSuite):
    @pytest.fixture(autouse=True)
    def _use(self, tmp_path):
        self.path = tmp_path / "slots"

    def make_tier(self, device, block_size):
        namespace = Namespace(model_digest="m", dtype="float32", layout="l", block_size=block_size)
        store = SlotFile(self.path, 32 * device.block_bytes, device.block_bytes, namespace)
        return StoredTier(store, Tier.DISK, device, 32)


class TestObjectTier(KvTierSuite):
    def make_tier(self, device, block_size):
        namespace = Namespace(model_digest="m", dtype="float32", layout="l", block_size=block_size)
        config = PacksConfig(gather_s=0.001, blocks_max=32)
        store = obstore.store.MemoryStore()
        return StoredTier(ObjectPacks(store, device.block_bytes, namespace, config), Tier.OBJECT, device, 32)


def test_device_blocks_are_found_in_the_engines_memory():
    memory = np.zeros((5, LAYOUT.num_layers * 2 * 4 * 2 * 4), np.float32)
    blocks = DeviceBlocks.of([[memory]], LAYOUT.split(num_blocks=4))
    assert blocks.block_bytes == memory[0].nbytes
    assert blocks.addresses([0, 3]).tolist() == [memory.ctypes.data, memory[3].ctypes.data]


@pytest.mark.parametrize(
    ("regions", "order", "why"),
    [
        ([], "| block layer kv token head", "has no KV memory"),
        (["region"] * 2, "| block layer kv token head", "has 2 regions"),
        (
            ["region"],
            "| layer kv block token head",
            "one region in which all layers of a block are contiguous",
        ),
        (["vram"], "| block layer kv token head", "memory of GPU 3"),
    ],
)
def test_memory_that_is_not_one_block_after_another_on_a_cpu_is_refused(regions, order, why, monkeypatch):
    memory = np.zeros((5, 512), np.uint8)
    vram = Region(
        kind=MemoryKind.VRAM, size_bytes=memory.nbytes, name="", address=1 << 40, owner=None, device=3
    )
    if "vram" in regions:
        monkeypatch.setattr("penstock.kv.device_blocks.region_of", lambda _: vram)
    with pytest.raises(ConfigError, match=why):
        DeviceBlocks.of([[memory for _ in regions]], LAYOUT.split(num_blocks=4, order=order))


def test_newer_measurements_outweigh_older_ones():
    speed = MeasuredSpeed()
    assert (speed.is_known, speed.seconds(5)) == (False, 0)
    speed.measure(10, 1.0)
    assert speed.seconds(10) == pytest.approx(1.0)
    for _ in range(30):
        speed.measure(10, 3.0)
    assert speed.seconds(10) == pytest.approx(3.0, rel=0.01)
    speed.measure(0, 5.0)
    assert speed.seconds(10) == pytest.approx(3.0, rel=0.01)


def test_what_was_slow_once_is_tried_again():
    now_s = 100.0
    speed = MeasuredSpeed(half_life_s=30.0, clock=lambda: now_s)
    speed.measure(1, 8.0)
    assert speed.seconds(1) == pytest.approx(8.0)
    now_s = 190.0
    assert speed.seconds(1) == pytest.approx(1.0)
    speed.measure(1, 8.0)
    assert speed.seconds(1) == pytest.approx(8.0)
