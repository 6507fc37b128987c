"""The findings as data, printed as tables or written as JSON."""

import msgspec

from penstock.core.wire import Wire


class MemoryFinding(Wire, frozen=True):
    """A kind of memory. `missing` is the reason why it is unavailable, "" if available."""

    kind: str
    missing: str = ""


class PathFinding(Wire, frozen=True):
    """One transport between two memories.

    Attributes:
        transport: its name.
        place: place of the other memory, one of `PLACES`.
        local: kind of this agent's memory.
        remote: kind of the other memory.
        read_gb_per_s: GB (10^9 bytes) per second, in scattered blocks of 256 KiB; objects and files sequentially in 1 MiB.
        write_gb_per_s: the same for writes.
        latency_us: microseconds of a 4 KiB read, from `post` to completion.
        refusal: reason why it does not work, then without figures; else "".
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
    """A transport. `refusals` are reasons why it does not work, by place or by `place, kind` of memory."""

    name: str
    refusals: dict[str, str] = msgspec.field(default_factory=dict)


class EngineFinding(Wire, frozen=True):
    """An engine, whether it can run on this machine.

    Attributes:
        name: as a graph gives it.
        version: of its packages; "" without any.
        devices: what it can run on here, `cpu` and `cuda`; empty: it cannot run.
        missing: why it runs on nothing or not on the GPU; "" if nothing is missing.
        fix: the command or setting that mends it.
        note: what else to know of it; "" if nothing.
    """

    name: str
    version: str = ""
    devices: tuple[str, ...] = ()
    missing: str = ""
    fix: str = ""
    note: str = ""


class HostFinding(Wire, frozen=True):
    """A relevant setting of the host or process. `advice` is what to change, "" if nothing."""

    name: str
    value: str
    advice: str = ""


class Findings(Wire, frozen=True):
    """All findings. `problems` are failures of transfers that should work."""

    version: str
    machine: str
    memories: tuple[MemoryFinding, ...]
    transports: tuple[TransportFinding, ...]
    paths: tuple[PathFinding, ...]
    host: tuple[HostFinding, ...]
    problems: tuple[str, ...] = ()
    engines: tuple[EngineFinding, ...] = ()


OWN, PROCESS, LOOPBACK = "this process", "another process", "TCP on 127.0.0.1"
PLACES = (OWN, PROCESS, LOOPBACK)
