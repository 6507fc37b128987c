"""What the doctor finds, as data: printed as tables, or written as JSON."""

import msgspec

from penstock.core.wire import Wire


class MemoryFinding(Wire, frozen=True):
    """A kind of memory. `missing` is why there is none here, "" if there is."""

    kind: str
    missing: str = ""


class PathFinding(Wire, frozen=True):
    """One transport between two memories.

    Attributes:
        transport: its name.
        place: where the other memory is, one of `PLACES`.
        local: kind of this agent's memory.
        remote: kind of the other memory.
        read_gb_per_s: GB = 10^9 bytes, in scattered blocks of 256 KiB; of objects and files 1 MiB, one after the other.
        write_gb_per_s: likewise.
        latency_us: of a read of 4 KiB, from `post` to done.
        refusal: why it does not work; then there are no figures.
    """

    transport: str
    place: str
    local: str
    remote: str
    read_gb_per_s: float = 0.0
    write_gb_per_s: float = 0.0
    latency_us: float = 0.0
    refusal: str = ""


class TransportFinding(Wire, frozen=True):
    """A transport. `refusals` says why it does not work, by place or by `place, kind` of memory."""

    name: str
    refusals: dict[str, str] = msgspec.field(default_factory=dict)


class HostFinding(Wire, frozen=True):
    """A setting of the host or the process that matters. `advice` is "" where nothing is to be done."""

    name: str
    value: str
    advice: str = ""


class Findings(Wire, frozen=True):
    """All of it. `problems` are measurements that failed though they should have worked."""

    version: str
    machine: str
    memories: tuple[MemoryFinding, ...]
    transports: tuple[TransportFinding, ...]
    paths: tuple[PathFinding, ...]
    host: tuple[HostFinding, ...]
    problems: tuple[str, ...] = ()


OWN, PROCESS, LOOPBACK = "this process", "another process", "TCP on 127.0.0.1"
PLACES = (OWN, PROCESS, LOOPBACK)
