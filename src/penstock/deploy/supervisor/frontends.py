"""The frontends of this host: the port that they share, and their processes."""

import asyncio
import errno
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from penstock.core.errors import ConfigError
from penstock.deploy.control.messages import ProcessView
from penstock.deploy.messages import FrontendJob, Job, ProcessFailed, RoundCounts
from penstock.deploy.supervisor.member import ProcessMember


class Port:
    """A port reserved for the deployment: bound, never listened on.

    Connections go to the frontends, which bind it too; number 0 picks a free port.
    """

    def __init__(self, host: str, number: int) -> None:
        """Bind the port.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # First without SO_REUSEPORT: with it, another program on the port would go unnoticed.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(address)
        except OSError as error:
            raise ConfigError(_explain(host, number, error)) from error
        self.host: str = self._socket.getsockname()[0]
        self.number: int = self._socket.getsockname()[1]

    def url(self, scheme: str = "http") -> str:
        """Give the URL for clients on this machine."""
        address = ipaddress.ip_address(self.host.partition("%")[0])
        if address.is_unspecified:
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        host = f"[{address}]" if address.version == 6 else str(address)
        return f"{scheme}://{host}:{self.number}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _explain(host: str, number: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"frontend.host: {host}: {error.strerror or 'unknown host'}; use an address of this machine, such as 127.0.0.1"
    if error.errno == errno.EADDRINUSE:
        return f"frontend.port: {number} on {host} is in use; stop what listens there, or choose another with --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"frontend.host: {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all"
    if error.errno == errno.EACCES:
        return f"frontend.port: {number} needs root; choose one above 1023 with --port"
    return f"frontend: cannot bind {host} port {number}: {(error.strerror or str(error)).lower()}"


def say_open(port: Port, *, is_open: bool) -> Iterator[str]:
    """Yield a warning if the API is open to other machines without a key."""
    if is_open and not port.is_loopback:
        yield (
            f"{port.host} port {port.number} answers whoever reaches it: no API key is set;"
            " give --api-key-file or PENSTOCK_API_KEY"
        )


MakeMember = Callable[[str, Callable[[], Job]], ProcessMember]
"""(name, what makes the job of its next process) -> a member that is not running yet."""


class FrontendProcesses:
    """The frontends. One event loop owns it."""

    def __init__(self, count: int) -> None:
        """Make no process yet: `fill` makes `count` of them, 0 where another host has the frontends."""
        self.members: list[ProcessMember] = []
        self.is_open = False
        """Whether the deployment has started. Before, a config error of one frontend ends the deployment; afterwards only if no other frontend serves."""
        self.count = count
        self._tasks: list[asyncio.Task[None]] = []
        self._unsent_failures: Counter[tuple[str, str]] = Counter()
        """Process failures by (name, reason) that were not sent to a frontend yet."""

    def fill(self, make: MakeMember, port: Port | None, runtime: Path) -> None:
        """Make the members.

        Args:
            make: makes one.
            port: the port that they share; None where there are none.
            runtime: the deployment's private directory, where several keep their metrics.
        """
        metrics_dir = runtime / "metrics" if self.count > 1 else None
        if metrics_dir is not None:
            metrics_dir.mkdir()

        def job() -> FrontendJob:
            if metrics_dir is not None:
                self._forget_dead(metrics_dir)
            assert port is not None, "frontends run here"
            return FrontendJob(host=port.host, port=port.number, metrics_dir=str(metrics_dir or ""))

        self.members = [make(f"frontend-{n + 1}", job) for n in range(self.count)]
        for member in self.members:
            member.may_give_up = self._nobody_serves
            member.may_refuse = lambda: not self.is_open or self._nobody_serves()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start the processes in `group`."""
        self._tasks = [group.create_task(member.run(), name=member.name) for member in self.members]

    async def started(self) -> None:
        """Wait until all are ready."""
        for member in self.members:
            await member.ready.wait()

    def open(self) -> None:
        """Note that the deployment has started."""
        self.is_open = True

    async def drain(self, patience_s: float) -> None:
        """Let the frontends finish their streams and take no new request; after `patience_s` kill them."""
        for member in self.members:
            member.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=patience_s)
        for member in self.members:
            member.kill()

    def processes(self) -> list[ProcessView]:
        """Describe their processes."""
        now_s = asyncio.get_running_loop().time()
        return [
            ProcessView(
                name=each.name, pid=each.pid, state=each.state, phase=each.phase, age_s=each.age_s(now_s)
            )
            for each in self.members
        ]

    def ready(self) -> tuple[str, ...]:
        """Name the frontends that are ready."""
        return tuple(member.name for member in self.members if member.ready.is_set())

    def note_failure(self, name: str, reason: str) -> None:
        """Have a frontend count the failure of a process."""
        self._unsent_failures[name, reason] += 1
        self.tell_failures()

    def tell_failures(self) -> None:
        """Send failures to one frontend, whose metrics count for all and survive its end."""
        if (frontend := self._any_ready()) is not None:
            for (name, reason), count in self._unsent_failures.items():
                frontend.tell(ProcessFailed(name=name, reason=reason, count=count))
            self._unsent_failures.clear()

    def tell_planned(self, planned: RoundCounts) -> None:
        """Send a planner's round to one frontend; without a ready frontend the round is not counted."""
        if (frontend := self._any_ready()) is not None:
            frontend.tell(planned)

    def _any_ready(self) -> ProcessMember | None:
        return next((member for member in self.members if member.ready.is_set()), None)

    def _nobody_serves(self) -> bool:
        return self._any_ready() is None

    def _forget_dead(self, metrics_dir: Path) -> None:
        """Remove the gauges of dead frontends from the metrics directory; counters stay."""
        living = {member.pid for member in self.members}
        for path in metrics_dir.glob("gauge_live*.db"):
            if int(path.stem.rpartition("_")[2]) not in living:
                path.unlink()
