"""A direct stream's client: keeps what is written to it, and is behind or gone where told to."""

from penstock.seams import DirectClient


class FakeTransport:
    """As much of a transport as a direct stream uses."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.is_closed = False
        self.unsent_bytes = 0

    def write(self, chunk: bytes) -> None:
        self.chunks.append(chunk)

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes


class FakeClient:
    """Notes what a direct stream tells it."""

    def __init__(self, buffer_bytes: int = 100) -> None:
        self.transport = FakeTransport()
        self.gaps_s: list[float] = []
        self.interrupts: list[bool] = []
        self.client = DirectClient(self.transport, buffer_bytes, self.gaps_s.append, self.interrupts.append)  # type: ignore[arg-type]
