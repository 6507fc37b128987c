"""The thread that calls NIXL, and how lists are cut for it, on bindings that do as they are told."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.descriptors import Descriptors, TransferOp
from penstock.core.errors import MemoryInUse, PeerLost, ProtocolError, TransferError
from penstock.core.wire import Wire, encode
from penstock.testing.transports.harness import TwoAgents
from penstock.transfer import TransferConfig, TransferState
from penstock.transfer.transports.nixl import channel as nixl_channel
from penstock.transfer.transports.nixl import transport as nixl
from penstock.transfer.transports.nixl.channel import cut, rows_of
from penstock.transfer.transports.nixl.frames import Given, Known, Place, decode
from penstock.transfer.transports.nixl.thread import Handles, NixlThread, Plan, row
from penstock.transfer.transports.nixl.transport import NixlTransport
from penstock.transfer.transports.sums import SumRanges

MIB = 1 << 20
FIELDS = ("region_ids", "offsets", "lengths")


class nixlRemoteDisconnectError(Exception):  # noqa: N801 - NIXL's name
    pass


class Described(list[Any]):
    def getType(self) -> str:  # noqa: N802
        return "dram"


class FakeNixl:
    """Stands for both the bindings and the agent: requests end when the test says so."""

    NIXL_INIT_AGENT = ""
    NIXL_WRITE, NIXL_READ = "write", "read"
    NIXL_IN_PROG, NIXL_SUCCESS = 1, 0
    DRAM_SEG, VRAM_SEG = "dram", "vram"

    def __init__(self, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.posted: list[int] = []
        self.under_way: set[int] = set()
        self.released: list[int] = []
        self.calls = 0
        self.error: Exception | None = None
        self.count = 0
        self.registered = 0
        self.peer_name = b"peer"
        self.invalidated: list[str] = []

    def nixlAgentConfig(self) -> Any:  # noqa: N802
        return type("Config", (), {})()

    def nixlAgent(self, name: str, config: Any) -> "FakeNixl":  # noqa: N802
        assert (config.useProgThread, config.pthrDelay) == (True, 10_000)
        return self

    def createBackend(self, name: str, options: dict[str, str]) -> int:  # noqa: N802
        assert name == "UCX"
        return 1

    def nixlRegDList(self, kind: str, rows: Any = ()) -> "Described":  # noqa: N802
        return Described(rows)

    def registerMem(self, described: Any, backends: list[int]) -> None:  # noqa: N802
        self.registered += 1

    def deregisterMem(self, described: Any, backends: list[int]) -> None:  # noqa: N802
        self.registered -= 1

    def getLocalPartialMD(self, described: Any, has_agent: bool, backends: list[int]) -> bytes:  # noqa: N802
        return b"metadata"

    def loadRemoteMD(self, metadata: bytes) -> bytes:  # noqa: N802
        return self.peer_name

    def invalidateRemoteMD(self, name: str) -> None:  # noqa: N802
        self.invalidated.append(name)

    def nixlXferDList(self, kind: str, rows: Any) -> Any:  # noqa: N802
        return rows

    def prepXferDlist(self, owner: str, rows: Any, backends: list[int]) -> int:  # noqa: N802
        if self.error:
            raise self.error
        return len(rows)

    def makeXferReq(self, *arguments: Any) -> int:  # noqa: N802
        self.count += 1
        return self.count

    def postXferReq(self, request: int) -> int:  # noqa: N802
        self.calls += 1
        if self.error:
            raise self.error
        self.posted.append(request)
        if self.at_once:
            return self.NIXL_SUCCESS
        self.under_way.add(request)
        return self.NIXL_IN_PROG

    def getXferStatus(self, request: int) -> int:  # noqa: N802
        self.calls += 1
        if self.error:
            raise self.error
        return self.NIXL_IN_PROG if request in self.under_way else self.NIXL_SUCCESS

    def releaseXferReq(self, request: int) -> None:  # noqa: N802
        if request in self.under_way and not self.error:
            raise RuntimeError("still under way")
        self.released.append(request)

    def releasedDlistH(self, handle: int) -> None: ...  # noqa: N802


@asynccontextmanager
async def four_parts() -> AsyncIterator[tuple[FakeNixl, NixlThread, Handles]]:
    """Give a thread with a list of four parts that is ready to be posted."""
    fake = FakeNixl()
    thread = NixlThread("own", lambda: fake)
    await thread.open()
    handles = Handles()
    rows = np.zeros((4, 3), np.uint64)
    plan = Plan("WRITE", "peer", ("DRAM", "DRAM"), (rows, rows), [(i, i + 1) for i in range(4)])
    await thread.call(lambda: thread.make_ready(handles, plan))
    try:
        yield fake, thread, handles
    finally:
        await thread.close()
        await thread.close()


async def turns(thread: NixlThread, count: int = 5) -> None:
    """Let the thread look at everything so many times."""
    for _ in range(count):
        await thread.call(lambda: None)


async def test_what_is_abandoned_is_freed_when_it_has_ended() -> None:
    async with four_parts() as (fake, thread, handles):
        cleaned: list[bool] = []
        flight = thread.fly(handles)
        await turns(thread)
        assert len(fake.posted) == 2
        thread.abandon(flight, lambda: cleaned.append(True))
        thread.discard(handles)
        await turns(thread)
        assert (flight.ended.done(), fake.released, cleaned) == (False, [], []), "NIXL is still at it"
        fake.under_way.clear()
        await flight.ended
        assert (sorted(fake.released), cleaned) == ([1, 2, 3, 4], [True])
    assert sorted(fake.released) == [1, 2, 3, 4], "each once: NIXL crashes otherwise"


async def test_memory_that_nixl_is_still_at_is_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_channel, "_LET_GO_S", 0.01)
    fakes = [FakeNixl(at_once=True), FakeNixl(at_once=True)]
    async with agents(fakes, heartbeat_timeout_s=0.2) as harness:
        monkeypatch.setattr(nixl_channel.NixlChannel, "_probe", _no_probe)
        ranges = harness.local.ranges(), harness.remote.ranges()
        prepared = harness.agent.prepare(*ranges, harness.peer)
        await prepared.post(TransferOp.READ).wait()
        (mine,) = [fake for fake in fakes if fake.posted]
        mine.at_once = False
        handle = prepared.post(TransferOp.READ)
        while not mine.under_way:  # noqa: ASYNC110 - the thread posts
            await asyncio.sleep(0)
        registered = mine.registered
        with pytest.raises(MemoryInUse, match="by what was cancelled"):
            await harness.agent.deregister(harness.local)
        assert handle.state is TransferState.FAILED
        assert mine.registered == registered, "NIXL goes on using it"
        assert harness.agent.quarantined == (harness.local,)
        mine.under_way.clear()
        await harness.agent.deregister(harness.local)
        assert not harness.agent.quarantined
        await harness.agent.close()
        assert mine.registered == registered - 1


async def _no_probe(*_: object) -> None: ...


async def test_an_agent_that_comes_back_is_known_and_many_that_do_not_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl, "_UNLINKED_AGENTS_MAX", 2)
    monkeypatch.setattr(nixl_channel.NixlChannel, "_probe", _no_probe)
    fakes = [FakeNixl(at_once=True), FakeNixl(at_once=True)]
    async with agents(fakes) as harness:
        for number in range(6):
            name = "peer" if number < 3 else f"peer {number}"
            for fake in fakes:
                fake.peer_name = name.encode()
            peer = await harness.agent.connect(harness.owner.metadata([harness.owned]))
            ranges = harness.local.ranges(), peer.region("there").ranges()
            await harness.agent.post(TransferOp.READ, *ranges, peer).wait()
            await harness.agent.disconnect(peer)
        await harness.agent.close()
        assert [name for fake in fakes for name in fake.invalidated] == ["peer", "peer 3"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(nixlRemoteDisconnectError("NIXL_ERR"), PeerLost), (ValueError("no"), TransferError)],
)
async def test_errors_are_the_librarys_own(error: Exception, expected: type[Exception]) -> None:
    async with four_parts() as (fake, thread, handles):
        flight = thread.fly(handles)
        await turns(thread)
        assert len(fake.posted) == 2
        fake.error = error
        with pytest.raises(expected, match=type(error).__name__) as seen:
            await flight.ended
        assert type(seen.value) is expected
        assert len(fake.posted) == 2


def agents(fakes: list[FakeNixl], heartbeat_timeout_s: float = 2.0) -> TwoAgents:
    waiting = iter(fakes)
    return TwoAgents(
        lambda: [NixlTransport(lambda: "nixl", lambda: next(waiting))],
        size_bytes=64,
        config=TransferConfig(listen=("unix",), heartbeat_timeout_s=heartbeat_timeout_s),
    )


@pytest.mark.parametrize(
    ("at_once", "text"),
    [(False, "NIXL does not reach agent owner: nothing came within"), (True, "NIXL reads other bytes")],
)
async def test_a_peer_that_ucx_does_not_reach_is_told_when_they_meet(
    at_once: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_channel, "_PROBE_S", 0.02)
    fakes = [FakeNixl(at_once=at_once), FakeNixl(at_once=at_once)]
    async with agents(fakes) as harness:
        handle = harness.agent.post(
            TransferOp.READ, harness.local.ranges(), harness.remote.ranges(), harness.peer
        )
        with pytest.raises(TransferError, match=text):
            await handle.wait()


async def test_memory_is_registered_in_the_context_of_its_device() -> None:
    fake, calls = FakeNixl(), []
    fake.registerMem = lambda described, backends: calls.append(described[0].tolist())  # type: ignore[method-assign]
    thread = NixlThread("own", lambda: fake, calls.append)
    await thread.open()
    calls.clear()
    for kind, device in (("VRAM", 1), ("VRAM", 0), ("DRAM", 0)):
        await thread.call(partial(thread.register, row(64, 8, device), kind))
    await thread.close()
    assert calls == [1, [64, 8, 1], 0, [64, 8, 0], [64, 8, 0]]


def test_each_range_is_described_with_its_own_device() -> None:
    places = {number: Place(kind="VRAM", address=1000 * number, device=number % 2) for number in (7, 8)}
    parts = [Descriptors.of(7, [0], 40 * MIB), Descriptors.of(8, [16, 32], 16), Descriptors.of(7, [8], 8)]
    ranges = Descriptors(*(np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS))
    pieces, _ = cut(ranges.lengths)
    assert rows_of(ranges, places, pieces)[:, 2].tolist() == [1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("installed", "cuda", "broken", "loaded"),
    [
        ((12, 13), None, (), 13),
        ((12, 13), "12.8", (), 12),
        ((12, 13), "13.0", (), 13),
        ((12, 13), None, (13,), 12),
        ((12, 13), None, (12, 13), None),
    ],
)
def test_nixl_is_that_of_the_cuda_in_use_or_else_the_first_that_can_be_imported(
    installed: tuple[int, ...],
    cuda: str | None,
    broken: tuple[int, ...],
    loaded: int | None,
    tmp_path: Path,
) -> None:
    for major in installed:
        package = tmp_path / f"nixl_cu{major}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "_bindings.py").write_text(f"raise ImportError('no {major}')" if major in broken else "")
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {cuda!r}")
    code = "import torch; from penstock.transfer.transports.nixl.thread import load_bindings; print(load_bindings().__name__)"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if loaded is None:
        assert all(
            f"nixl_cu{major} is installed and cannot be imported: no {major}" in run.stderr
            for major in broken
        )
    else:
        assert run.stdout.strip() == f"nixl_cu{loaded}._bindings", run.stderr


@given(st.lists(st.integers(1, 100 * MIB), min_size=1, max_size=60))
def test_pieces_cover_their_ranges_once_and_parts_cover_the_pieces(sizes: list[int]) -> None:
    lengths = np.array(sizes, np.uint64)
    (index, offsets, pieces), parts = cut(lengths)
    assert int(pieces.max()) <= 32 * MIB
    assert int(pieces.min()) > 0
    ends: dict[int, int] = {}
    for of, at, size in zip(index.tolist(), offsets.tolist(), pieces.tolist(), strict=True):
        assert ends.get(of, 0) == at
        ends[of] = at + size
    assert [ends[i] for i in range(len(sizes))] == sizes
    assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == len(pieces)
    for first, end in parts:
        assert int(pieces[first:end].sum()) < 64 * MIB


def test_ranges_survive_the_way_and_nonsense_is_refused() -> None:
    asked = decode(encode(SumRanges.of(Descriptors.of(7, [0, 8], 4))), SumRanges, "peer")
    assert asked.ranges.offsets.tolist() == [0, 8]
    for nonsense in (b"", b"\xc1", encode(asked)[:-1]):
        with pytest.raises(ProtocolError, match="peer"):
            decode(nonsense, SumRanges, "peer")
    with pytest.raises(ProtocolError, match="columns"):
        _ = SumRanges(region_ids=b"12345678", offsets=b"", lengths=b"").ranges


@given(st.binary(max_size=200), st.sampled_from([Given, Known, SumRanges]))
def test_any_bytes_are_a_message_or_a_protocol_error(data: bytes, kind: type[Wire]) -> None:
    try:
        message = decode(data, kind, "peer")
        if isinstance(message, SumRanges):
            assert len(message.ranges) >= 0
    except ProtocolError:
        pass
