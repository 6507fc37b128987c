"""The deployments of this user on this host, those that were killed included: found by their private directories."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.files import write_whole
from penstock.core.wire import Wire
from penstock.deploy.group_file import end_groups, living_groups
from penstock.deploy.state import LOCK_NAME, is_locked, orphan, runtime_directories

if TYPE_CHECKING:
    from penstock.graph import Graph


_NAME = "deployment.json"


class DeploymentOrigin(Wire, frozen=True):
    """How a command started the deployment.

    Attributes:
        file: the graph's file, absolute; empty for a graph made of flags.
        directory: where the command was run.
        overrides: values set by flags, by dotted path.
        part: what `--run` said; None for all.
    """

    file: str = ""
    directory: str = ""
    overrides: dict[str, Any] = msgspec.field(default_factory=dict)
    part: str | None = None


class DeploymentRecord(Wire, frozen=True):
    """A deployment of this host.

    Attributes:
        name: the graph's.
        pid: the supervisor's process.
        started_s: wall-clock seconds since the epoch.
        stop_s_max: seconds that it takes at most to drain and end.
        log: file of what its processes print.
        origin: None for a deployment within a program of somebody's own, which no command ends.
        follows: for a node that follows a worker over several nodes, which one it is, as `node 1 of 2`; else empty.
        url: of its frontends on this host; empty where there are none.
        certificate: file of the frontends' certificate, absolute; empty where they speak HTTP.
    """

    name: str
    pid: int
    started_s: float
    stop_s_max: float
    log: str = ""
    origin: DeploymentOrigin | None = None
    follows: str = ""
    url: str = ""
    certificate: str = ""


def unnamed_file(graph: "Graph", origin: DeploymentOrigin | None) -> str:
    """Give the graph's file where the graph has no name, so that only its file tells it from others; else an empty string."""
    return "" if origin is None or "name" in graph.model_fields_set else origin.file


def keep_record(directory: Path, record: DeploymentRecord) -> None:
    """Write a record for the commands of this host.

    Raises:
        ConfigError: the directory cannot be written, as on a full disk.
    """
    try:
        write_whole(directory / _NAME, msgspec.json.encode(record))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"{directory}: cannot be written: {why}") from error


def read_record(directory: Path) -> DeploymentRecord | None:
    """Read it; None where there is none yet, or that of another version."""
    try:
        return msgspec.json.decode((directory / _NAME).read_bytes(), type=DeploymentRecord)
    except (OSError, msgspec.DecodeError):
        return None


_WHOLE = "all"
"""What `--part` calls a deployment that was started without `--run`."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A deployment's directory.

    Attributes:
        record: None before the deployment has written it.
        is_live: whether its supervisor holds the directory's lock, which the kernel releases however the supervisor ends.
    """

    directory: Path
    record: DeploymentRecord | None
    is_live: bool

    @property
    def name(self) -> str:
        return "?" if self.record is None else self.record.name

    def left(self) -> int:
        """Count the process groups that a killed deployment has left."""
        return 0 if self.is_live else len(living_groups(self.directory))

    def still_runs(self) -> bool:
        """Look again whether it is there and live."""
        return is_locked(self.directory)

    def clean(self) -> int | None:
        """End the processes of a deployment that was killed and remove its directory.

        Returns:
            the number of process groups that it had left; None where another process has removed it, or is about to.
        """
        with orphan(self.directory) as is_ours:
            if not is_ours:
                return None
            ended = end_groups(self.directory)
            shutil.rmtree(self.directory, ignore_errors=True)
            return ended


def hosted() -> list[Hosted]:
    """List them, the living ones first."""
    directories = (path for path in runtime_directories() if (path / LOCK_NAME).exists())
    found = [Hosted(path, read_record(path), is_locked(path)) for path in directories]
    return sorted(found, key=lambda each: (not each.is_live, each.name, _file(each), str(each.directory)))


def choose(
    found: list[Hosted],
    *,
    file: Path | None = None,
    name: str | None = None,
    part: str | None = None,
    url: str | None = None,
    flags: str = "--name or --part",
) -> Hosted:
    """Choose the only one; else the only one of this graph file, name, part and URL, or that was started in this directory.

    Args:
        found: the deployments.
        file: the graph's file.
        name: the graph's name.
        part: what `is_part` takes.
        url: of its frontends.
        flags: what the command has to choose by, for its user.

    Raises:
        Unavailable: there is none.
        ConfigError: several fit; the text names them.
    """
    fitting = [each for each in found if _fits(each, file, name, part, url)]
    if not fitting:
        wanted = f" of {file}" if file is not None else f" called {name}" if name is not None else ""
        wanted += "" if url is None else f" at {url}"
        wanted += "" if part is None else f" with --part {part}"
        known = ", ".join(_named(each) for each in found)
        raise Unavailable(
            f"no deployment{wanted} of this user runs on this host" + (f"; there is {known}" if known else "")
        )
    here = [each for each in fitting if _directory(each) == str(Path.cwd())]
    for several in (fitting, here):
        if len(several) == 1:
            return several[0]
    listed = ", ".join(f"{_named(each)}{describe_part(each.record)}" for each in fitting)
    raise ConfigError(f"{len(fitting)} deployments fit: {listed}; choose one by {flags}")


def is_part(record: DeploymentRecord | None, part: str) -> bool:
    """Tell whether `--part` names a deployment: by what `penstock up --run` said, `all` without it, or its process number."""
    return record is not None and (part == str(record.pid) or _roles(part) == _roles(_part(record)))


def describe_part(record: DeploymentRecord | None) -> str:
    """Say what `--part` can name it by, for a text that lists several."""
    return "" if record is None else f" (--part {_part(record)}, or {record.pid})"


def _part(record: DeploymentRecord) -> str:
    return _WHOLE if record.origin is None or record.origin.part is None else record.origin.part


def _roles(part: str) -> set[str]:
    """Read the roles of `frontend,decode=2`: numbers do not count."""
    return {item.partition("=")[0].strip() for item in part.split(",")} - {""}


def _fits(each: Hosted, file: Path | None, name: str | None, part: str | None, url: str | None) -> bool:
    record = each.record
    if url is not None and (record is None or record.url != url):
        return False
    if name is not None and (record is None or record.name != name):
        return False
    if part is not None and not is_part(record, part):
        return False
    if file is None:
        return True
    return record is not None and record.origin is not None and record.origin.file == str(file.resolve())


def _file(each: Hosted) -> str:
    origin = None if each.record is None else each.record.origin
    return "" if origin is None else origin.file


def _directory(each: Hosted) -> str | None:
    origin = None if each.record is None else each.record.origin
    return None if origin is None else origin.directory


def _named(each: Hosted) -> str:
    origin = None if each.record is None else each.record.origin
    at = f" at {each.record.url}" if each.record is not None and each.record.url else ""
    where = at if origin is None else f"{at} of {origin.file or origin.directory}"
    return f"{each.name}{where}" if each.is_live else f"{each.name}, which was killed"


class SupervisorProcess:
    """The process that holds a deployment's lock; signals reach no other process that gets its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    @contextmanager
    def of(cls, found: Hosted) -> Iterator["SupervisorProcess"]:
        """Open the process of a live deployment.

        Raises:
            Unavailable: it has just ended, has not said who it is yet, or runs in another container.
            ConfigError: it is a program of somebody's own.
        """
        record = found.record
        if record is None:
            raise Unavailable(f"{found.directory}: is about to start; try again in a moment")
        if record.origin is None:
            raise ConfigError(
                f"{record.name} runs within a program (process {record.pid}), which has to end it by itself"
            )
        try:
            descriptor = os.pidfd_open(record.pid)
        except OSError as error:
            raise _elsewhere(record) from error
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if not _holds(record.pid, found.directory / LOCK_NAME):
                raise _elsewhere(record)
            yield cls(descriptor)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


def _elsewhere(record: DeploymentRecord) -> Unavailable:
    return Unavailable(
        f"{record.name}: process {record.pid} of this host is not its supervisor: it has just ended, or runs in another container;"
        " if so, run this command there"
    )


def _holds(pid: int, lock: Path) -> bool:
    """Tell whether a process has a file open."""
    try:
        status = lock.stat()
        with closing(os.scandir(f"/proc/{pid}/fd")) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if os.path.samestat(status, entry.stat()):
                        return True
    except OSError:
        pass
    return False
