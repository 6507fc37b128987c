"""Remembers the workers of a deployment, so that a restarted one has as many as it was scaled to."""

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.files import write_whole
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.graph import RoleSpec

_VERSION = 1
_log = get_logger()


class KeptWorker(Wire, frozen=True):
    """A worker to start again: its role, and the role whose settings it has."""

    home: Role
    index: int
    role: Role


def declared_workers(roles: Mapping[Role, RoleSpec]) -> tuple[KeptWorker, ...]:
    """List the workers of the graph, in the order in which they get GPUs and cores."""
    return tuple(
        KeptWorker(home=role, index=index, role=role)
        for role, spec in roles.items()
        for index in range(spec.replicas)
    )


class KeptScale(Wire, frozen=True):
    """The content of the file. `declared` are the graph's replicas: with other ones, the graph counts.

    `graph` is the file of a graph without a name: such graphs of several folders have one directory, and another one's scale does not count.
    """

    version: int
    declared: dict[Role, int]
    workers: tuple[KeptWorker, ...]
    revision: int
    changed_by: str = ""
    graph: str = ""


class ScaleFile:
    """The file of one deployment, locked by the first process that opens it. The kernel releases the lock however it ends."""

    def __init__(
        self, directory: Path, declared: Mapping[Role, int], *, spans_hosts: bool = False, graph: str = ""
    ) -> None:
        """Open the file.

        Args:
            directory: the deployment's directory that survives restarts; made if it is not there.
            declared: replicas of the graph's roles.
            spans_hosts: whether workers of other hosts may answer requests, so that this one may have none.
            graph: the graph's file, where the graph has no name; else empty.
        """
        self._path = directory / "scale.json"
        self._declared = dict(declared)
        self._spans_hosts = spans_hosts
        self._graph = graph
        self._lock = _lock(directory / "scale.lock")
        self.is_ours = self._lock is not None
        """Whether this process may read and write it; not where another deployment of this name runs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def path(self) -> Path:
        return self._path

    def declare(self, declared: Mapping[Role, int]) -> None:
        """Keep workers from now on as those of a graph with these replicas."""
        self._declared = dict(declared)

    def load(self) -> KeptScale | None:
        """Return what was kept; None if nothing was, it is another graph's, the graph's replicas have changed, or the file is damaged."""
        if not self.is_ours:
            return None
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptScale)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            _log.warning(
                "scale_file_damaged",
                path=str(self._path),
                error=str(error),
                effect="starts as the graph says",
            )
            return None
        if kept.version != _VERSION or (kept.declared, kept.graph) != (self._declared, self._graph):
            return None
        return kept if self._is_sound(kept) else None

    def _is_sound(self, kept: KeptScale) -> bool:
        """Tell whether the workers are of the graph's roles, each once, and one answers requests."""
        places = {(worker.home, worker.index) for worker in kept.workers}
        return (
            len(places) == len(kept.workers)
            and all(home in self._declared and index >= 0 for home, index in places)
            and (self._spans_hosts or any(worker.role is not Role.PREFILL for worker in kept.workers))
        )

    def save(self, workers: tuple[KeptWorker, ...], *, revision: int, changed_by: str) -> None:
        """Keep these workers; a failure is logged."""
        if not self.is_ours:
            return
        kept = KeptScale(
            version=_VERSION,
            declared=self._declared,
            workers=workers,
            revision=revision,
            changed_by=changed_by,
            graph=self._graph,
        )
        try:
            write_whole(self._path, msgspec.json.encode(kept))
        except OSError as error:
            _log.warning(
                "scale_not_kept", path=str(self._path), error=str(error), effect="a restart has other workers"
            )


def _lock(path: Path) -> int | None:
    """Lock a file; None if another process has, or the directory is not writable."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return lock
    return None
