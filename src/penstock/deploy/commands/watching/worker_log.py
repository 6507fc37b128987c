"""What one worker has printed, where its deployment runs on this host as this user."""

import asyncio
from collections import deque
from pathlib import Path

from penstock.core.errors import PenstockError, Unavailable
from penstock.deploy.commands.hosted.logs import Follower, process_of
from penstock.deploy.commands.watching.words import printable
from penstock.deploy.control.hosted import hosted
from penstock.deploy.control.local_connector import LocalConnector
from penstock.deploy.control.messages import SOCKET_NAME

_ENTRY_S = 1.0
_LINES_MAX = 200


class WorkerLog:
    """The last lines of a worker's output, and later those that have come since. One thread owns it."""

    def __init__(self, name: str, pid: int) -> None:
        """Find the log of the deployment that has this process.

        Raises:
            Unavailable: no deployment of this user on this host has it, or it has printed nothing yet.
        """
        self._process = name.partition("@")[0]
        self._follower = Follower(_log_of(self._process, pid))

    def lines(self) -> list[str]:
        """Give what came since the last time: at first the last 200 lines."""
        found = (text for text in self._follower.lines() if process_of(text) == self._process)
        return [printable(text).expandtabs() for text in deque(found, maxlen=_LINES_MAX)]

    def close(self) -> None:
        self._follower.close()


def _log_of(process: str, pid: int) -> Path:
    for each in hosted():
        if not each.is_live or each.record is None or not Path(each.record.log).is_file():
            continue
        try:
            processes = asyncio.run(
                LocalConnector(each.directory / SOCKET_NAME, entry_s=_ENTRY_S).processes()
            )
        except PenstockError:
            continue  # it starts or ends, or another user's
        if any((found.name, found.pid) == (process, pid) for found in processes):
            return Path(each.record.log)
    raise Unavailable(
        f"{process} (process {pid}) is of another host or user: `penstock logs {process}` there shows its log"
    )
