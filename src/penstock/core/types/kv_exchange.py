"""How a worker can be reached by others that read its KV, and by which ways it reads theirs."""

from penstock.core.wire import Wire


class KvSource(Wire, frozen=True):
    """What a decode worker needs to read a prefill worker's KV memory.

    Attributes:
        agent: metadata of the prefill worker's transfer agent.
        layout: its encoded `KvLayout`; empty for an engine that keeps no memory for KV.
        regions: region ids of that agent, for each rank of the layout.
    """

    agent: bytes = b""
    layout: bytes = b""
    regions: tuple[tuple[int, ...], ...] = ()


class KvExchange(Wire, frozen=True):
    """What a worker that hands prompts over, or takes them over, says of its ways to others.

    Attributes:
        transports: those of `penstock.transfer` that can reach its KV, or that it will try once that is needed.
        listens: the kinds of address that others can reach it at: `memory`, `unix`, `tcp`.
        host: names the machine as far as memory and local sockets reach.
        streams: whether its KV can be read while the prompt is still being computed.
        setups_s: what each of `transports` takes to reach another worker for the first time, in seconds.
        source: how its KV is read; None for a worker that has offered none so far, such as a decode worker.
    """

    transports: tuple[str, ...]
    listens: tuple[str, ...]
    host: bytes
    streams: bool = False
    setups_s: tuple[float, ...] = ()
    source: KvSource | None = None
