"""KV transfer capabilities of a worker: how others read its KV, and by which transports it reads theirs."""

from penstock.core.wire import Wire


class KvAccess(Wire, frozen=True):
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
    """What a prefill or decode worker registers about KV transfer.

    Attributes:
        transports: transports of `penstock.transfer` that can reach its KV, or that it will try when needed.
        listens: kinds of address at which peers can connect: `memory`, `unix`, `tcp`.
        host: id of the machine, equal for workers that share memory and local sockets.
        streams: whether its KV can be read while the prompt is still being computed.
        setups_s: seconds that each of `transports` needs for its first connection to a peer.
        source: how to read its KV; None for a worker that has exported none so far, such as a decode worker.
    """

    transports: tuple[str, ...]
    listens: tuple[str, ...]
    host: bytes
    streams: bool = False
    setups_s: tuple[float, ...] = ()
    source: KvAccess | None = None

    @classmethod
    def native(cls, kind: str) -> "KvExchange":
        """Describe a worker whose engine transfers KV itself, to engines of the same kind wherever they are."""
        return cls(transports=(kind,), listens=(), host=b"any")
