"""Settings of the frontend: where it listens and what it lets a client use up."""

from typing import Self

import pydantic

from penstock.core.config import Config, wrong


class ReceiveConfig(Config):
    """How long requests may take to arrive, and how much of them is kept meanwhile."""

    timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """Longest time from a request's first byte to the end of its headers, and from there to the end of its body; then it ends with 408."""
    bytes_max: int = pydantic.Field(default=256 << 20, ge=1024)
    """Bytes of requests that have come and are not encoded yet, over all connections of one process; past it the largest unfinished body gets 503."""


class FrontendReceiveConfig(ReceiveConfig):
    """What a frontend spends on requests that arrive."""

    encoders_max: int = pydantic.Field(default=2, ge=1, le=64)
    """Processes that decode and encode bodies over 64 KiB, started when such bodies come; each loads the tokenizers it needs."""


class StreamConfig(Config):
    """What keeps a stream alive that has nothing to say: proxies give up silent connections, many after 60 s."""

    headers_after_s: float = pydantic.Field(default=5.0, gt=0)
    """How long a stream waits for its first token before its headers go out; an error that comes later is an event of the stream, not an HTTP status."""
    heartbeat_s: float = pydantic.Field(default=15.0, gt=0)
    """How long a stream may be silent; then it gets a comment, which clients pass over."""


class FrontendConfig(Config):
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = pydantic.Field(default=8000, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    api_key_file: str | None = None
    """A file of API keys, one a line; then `/v1` asks for one as a bearer token, as it does where PENSTOCK_API_KEY is set."""
    body_bytes_max: int = pydantic.Field(default=8 << 20, ge=1024)
    """Largest request body, after decompression; a larger one gets 413."""
    receive: FrontendReceiveConfig = FrontendReceiveConfig()
    """How requests arrive."""
    inflight_max: int = pydantic.Field(default=8192, ge=1)
    """Requests under way at once in one process; the next one gets 503 with Retry-After, whoever sends it. More than run on the workers and `router.queue.requests_max` wait, so that these are refused by tenant first."""
    session_header: str = pydantic.Field(default="X-Session-Id", pattern=r"^[A-Za-z0-9-]+$")
    """Header in which a client names its session, for the routing policy `session`."""
    tenant_header: str = pydantic.Field(default="X-Tenant-Id", pattern=r"^[A-Za-z0-9-]+$")
    """Header that names the tenant for which a request is counted where requests wait (docs/routing.md)."""
    priority_header: str = pydantic.Field(default="X-Priority", pattern=r"^[A-Za-z0-9-]+$")
    """Header that says `high`, `normal` or `low`, for requests that wait (docs/routing.md)."""
    explains: bool = False
    """Whether a client may ask, by `X-Penstock-Explain: 1`, why its request went where it did; such answers name workers and tell their load."""
    choices_max: int = pydantic.Field(default=128, ge=1)
    """Most choices of one request: prompts times n."""
    request_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Longest time from the end of a request's body to its last token; then it ends with 504."""
    reader_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Longest time in which a client takes no byte of its stream that waits for it; then its connection is cut."""
    keepalive_timeout_s: float = pydantic.Field(default=75.0, gt=0)
    """How long an idle connection stays open."""
    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0)
    """On shutdown, how long requests under way may still take."""
    stream: StreamConfig = StreamConfig()
    """What silent streams send."""
    write_buffer_bytes: int = pydantic.Field(default=64 << 10, ge=4096)
    """What is buffered for a client that reads slowly, before its stream waits; as much again in the kernel."""
    models_max: int = pydantic.Field(default=16, ge=1)
    """Tokenizers and chat templates kept in memory, by model; of as many LoRA adapters it is known that they were served lately."""

    @pydantic.model_validator(mode="after")
    def _check_bodies(self) -> Self:
        check_bodies(self.body_bytes_max, self.receive)
        return self


def check_bodies(body_bytes_max: int, receive: ReceiveConfig) -> None:
    """Raises: ValueError: there is no room for the largest body."""
    if body_bytes_max > receive.bytes_max:
        raise wrong(
            f"body_bytes_max: must be <= receive.bytes_max, got {body_bytes_max} > {receive.bytes_max}"
        )
