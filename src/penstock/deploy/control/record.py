"""What a deployment writes of itself into its private directory, for commands that look after it without asking it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.core.files import write_whole
from penstock.core.wire import Wire

if TYPE_CHECKING:
    from penstock.graph import Graph

_NAME = "deployment.json"


class Origin(Wire, frozen=True):
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
    origin: Origin | None = None
    follows: str = ""
    url: str = ""
    certificate: str = ""


def unnamed_file(graph: "Graph", origin: Origin | None) -> str:
    """Give the graph's file where the graph has no name, so that only its file tells it from others; else an empty string."""
    return "" if origin is None or "name" in graph.model_fields_set else origin.file


def keep_record(directory: Path, record: DeploymentRecord) -> None:
    """Write it; raises OSError."""
    write_whole(directory / _NAME, msgspec.json.encode(record))


def read_record(directory: Path) -> DeploymentRecord | None:
    """Read it; None where there is none yet, or that of another version."""
    try:
        return msgspec.json.decode((directory / _NAME).read_bytes(), type=DeploymentRecord)
    except (OSError, msgspec.DecodeError):
        return None
