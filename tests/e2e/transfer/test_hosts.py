"""Two hosts, as far as sockets can tell: network namespaces with a cable between them, which is pulled out mid-transfer.

It needs iproute2 and the right to make namespaces, which root has.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.transfer import TransferConfig, TransferOp
from tests.support.cable import Cable, cable

SIZE_BYTES = 32 << 20
FOLDER = Path(__file__).parents[1] / "helpers"

pytestmark = [pytest.mark.slow, pytest.mark.needs("ip", "namespaces")]


@asynccontextmanager
async def program(name: str, script: str, *words: str) -> AsyncIterator[asyncio.StreamReader]:
    """Run a script in a namespace; gives what it prints."""
    command = ("ip", "netns", "exec", name, sys.executable, str(FOLDER / script), *words)
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        yield child.stdout
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def _line(output: asyncio.StreamReader, within_s: float = 60) -> list[str]:
    async with asyncio.timeout(within_s):
        return (await output.readline()).decode().rstrip("\n").split("\t")


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("op", [TransferOp.READ, pytest.param(TransferOp.WRITE, marks=pytest.mark.nightly)])
def test_a_pulled_cable_is_a_lost_peer_by_its_heartbeats_and_a_plugged_in_one_is_used_again(
    op: TransferOp, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # else it sees that this is one host, and needs no cable

    async def main(laid: Cable) -> None:
        config = TransferConfig(
            listen=(f"tcp://{laid.addresses[0]}:0",),
            heartbeat_timeout_s=1.0,
            connect_timeout_s=1.0 if transport == "tcp" else 5.0,  # NIXL is loaded then
            secret="two hosts",
            transports=(transport,),
        )
        away = config.model_copy(update={"listen": ()})
        async with program(laid.names[0], "transfer_owner.py", _json(config), str(SIZE_BYTES)) as owner:
            (metadata,) = await _line(owner)
            async with program(
                laid.names[1], "transfer_reader.py", _json(away), metadata, op.value, str(SIZE_BYTES)
            ) as reader:
                assert await _line(reader) == ["moving", transport]
                await asyncio.sleep(0.2)
                laid.pull()
                word, error, under_way = await _line(reader)
                assert word == "lost"
                assert "agent owner is gone: silent for" in error
                assert under_way == "0"
                laid.plug_in()
                assert await _line(reader) == ["moved again"]

    with cable() as laid:
        asyncio.run(main(laid))


def _json(config: TransferConfig) -> str:
    """Dump with the secret, which `model_dump_json` hides."""
    return config.model_dump_json().replace("**********", config.secret.get_secret_value())
