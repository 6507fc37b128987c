"""The other process of the tests: `python -m penstock.doctor.neighbour` exports its memory until its stdin ends."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.core import log
from penstock.core.errors import TransferError
from penstock.doctor.findings import LOOPBACK, PROCESS
from penstock.doctor.memories import Memories
from penstock.transfer import TransferAgent, TransferConfig

NETWORKED = ("tcp",)
"""Transports that use the link's kind of socket: tested over TCP, as between hosts."""
_START_S = 20.0
_STOP_S = 5.0


@asynccontextmanager
async def neighbour() -> AsyncIterator[dict[str, bytes]]:
    """Run the other process; yields the metadata of its agents by place.

    Raises:
        TransferError: the process does not start.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        async with asyncio.timeout(_START_S):
            line = await child.stdout.readline()
            if not line:
                said = (await child.stderr.read()).decode(errors="replace").strip().splitlines()
                raise TransferError(
                    f"another process could not start: {said[-1] if said else 'no reason given'}"
                )
        yield {place: bytes.fromhex(text) for place, text in json.loads(line).items()}
    except TimeoutError as error:
        raise TransferError(f"another process was not ready within {_START_S:g} s") from error
    finally:
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()


async def _main() -> None:
    near = TransferConfig(listen=("unix",))
    far = TransferConfig(listen=("tcp://127.0.0.1:0",), transports=NETWORKED)
    with Memories(None) as memories:
        async with TransferAgent("neighbour", near) as by_unix, TransferAgent("loopback", far) as by_tcp:
            for agent in (by_unix, by_tcp):
                memories.register(agent)
            shown = {PROCESS: by_unix.metadata().hex(), LOOPBACK: by_tcp.metadata().hex()}
            print(json.dumps(shown), flush=True)  # noqa: T201 - read by the doctor
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    log.configure("error", process="neighbour")
    asyncio.run(_main())
