"""Penstock's tiers as SGLang's HiCache storage, asked as its cache controller asks."""

import hashlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.core.errors import ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine
PAGE = 4


@pytest.fixture
def hicache(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's module, over the fake."""
    from tests.fakes import hicache_storage as fake

    names = ["sglang", "sglang.srt", "sglang.srt.mem_cache"]
    for name in names:
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, f"{names[-1]}.hicache_storage", fake)
    monkeypatch.delitem(sys.modules, "penstock.engine.sglang.hicache", raising=False)
    from penstock.engine.sglang import hicache

    yield hicache
    sys.modules.pop("penstock.engine.sglang.hicache", None)


@pytest.fixture
def opened(hicache: Any, tmp_path: Path) -> Any:
    """Opens backends over a pool; each is closed before the next one, as a file has one owner."""
    from tests.fakes.hicache_storage import HiCacheStorageConfig, HostPool

    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    open_: list[Any] = []

    def make(num_pages: int = 32, **fields: Any) -> tuple[Any, HostPool]:
        while open_:
            open_.pop().close()
        extra = {"kv": {"disk": f"{tmp_path}/pages:1MiB"}, "model": str(model), "interface_v1": 1}
        config = HiCacheStorageConfig(extra_config=extra | fields.pop("extra", {}), **fields)
        storage, pool = hicache.PenstockStorage(config, {}), HostPool(num_pages, PAGE)
        storage.register_mem_pool_host(pool)
        open_.append(storage)
        return storage, pool

    yield make
    while open_:
        open_.pop().close()


def keys_of(count: int, prompt: str = "a") -> list[str]:
    """Give the chained SHA-256 of pages, as SGLang does."""
    keys, digest = [], b""
    for number in range(count):
        digest = hashlib.sha256(digest + f"{prompt} {number}".encode()).digest()
        keys.append(digest.hex())
    return keys


def indices(*pages: int) -> Any:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])


def filled(pool: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=generator))
    return pool.kv_buffer.clone()


def page_of(buffer: Any, page: int) -> Any:
    return buffer[:, :, page * PAGE : (page + 1) * PAGE]


def test_pages_come_back_in_another_process_and_at_other_places(opened: Any, tmp_path: Path) -> None:
    from tests.fakes.hicache_storage import HiCacheStorageExtraInfo

    storage, pool = opened()
    before, keys = filled(pool), keys_of(6)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys[:4], indices(7, 3, 5, 9)) == [True] * 4
    info = HiCacheStorageExtraInfo(prefix_keys=keys[:4])
    assert storage.batch_set_v1(keys[4:], indices(1, 2), info) == [True] * 2
    assert storage.batch_exists(keys) == 6
    assert storage.batch_exists(keys[2:]) == 4, "SGLang asks for what its own pools lack"
    again, pool = opened()
    assert again.batch_exists(keys) == 6
    # a busy machine gives up what comes late; it may be asked for again
    assert any(all(again.batch_get_v1(keys[2:], indices(20, 21, 22, 23))) for _ in range(50))
    for page, source in zip((20, 21, 22, 23), (5, 9, 1, 2), strict=True):
        assert torch.equal(page_of(pool.kv_buffer, page), page_of(before, source))
    assert not pool.kv_buffer[:, :, : 20 * PAGE].any()
    again.clear()
    assert again.batch_exists(keys) == 0
    assert not again.exists(keys[0])
    opened(tp_rank=1, tp_size=2)
    assert (tmp_path / "pages.sglang.1-of-2").exists(), "ranks have files of their own"


def test_a_damaged_page_and_what_follows_it_is_not_there(opened: Any, tmp_path: Path) -> None:
    storage, pool = opened()
    filled(pool)
    keys = keys_of(3)
    storage.batch_set_v1(keys, indices(0, 1, 2))
    storage.close()
    (data,) = (path for path in tmp_path.glob("pages.*") if not path.name.endswith(".records"))
    content = bytearray(data.read_bytes())
    for at in range(4096, 8192, 64):  # the second slot
        content[at] ^= 1
    data.write_bytes(content)
    again, _ = opened()
    found = again.batch_get_v1(keys, indices(4, 5, 6))
    assert found.count(True) < 3
    assert found == sorted(found, reverse=True), "the first that is missing ends it"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"extra": {"kv": None}}, "kv missing"),
        ({"extra": {"interface_v1": 0}}, "interface_v1 missing"),
        ({"extra": {"kv": {"host": "8"}}}, "must be a size with its unit"),
        ({"is_mla_model": True, "tp_size": 2}, "an MLA model on 2 devices has one writer"),
    ],
)
def test_wrong_settings_are_refused(opened: Any, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        opened(**fields)
