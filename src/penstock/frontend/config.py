"""Settings of the frontend: where it listens and what it lets a client use up."""

from typing import Self

import pydantic
from yarl import URL

from penstock.core.config import Config, ListenHost, wrong


class ReceiveConfig(Config):
    """How long a request may take to arrive, and how many bytes of unread requests are buffered."""

    timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """Longest time from a request's first byte to the end of its headers, and again from there to the end of its body; a slower request gets 408."""
    bytes_max: int = pydantic.Field(default=256 << 20, ge=1024)
    """Bytes of received requests that are not encoded yet, over all connections of one process; beyond this the largest unfinished body gets 503."""


class FrontendReceiveConfig(ReceiveConfig):
    """Receive limits of a frontend, which also has encoder processes."""

    encoders_max: int = pydantic.Field(default=2, ge=1, le=64)
    """Encoder processes at most; they decode and tokenize bodies over 64 KiB, start on demand, and each loads the tokenizers it needs."""


class MediaFetchConfig(Config):
    """From where the frontend fetches images and the like that a request names by an http(s) URL."""

    hosts: tuple[str, ...] = ()
    """Hosts, by the name in the URL, from which media are fetched; any other URL gets 400. NAME is asked at the ports of http and https, NAME:PORT at that one. Empty: none, so clients send data URLs."""
    private_addresses: bool = False
    """Whether these hosts may have private, loopback or link-local addresses; redirects are never followed."""
    bytes_max: int = pydantic.Field(default=8 << 20, ge=1024)
    """Largest file that is fetched."""
    timeout_s: float = pydantic.Field(default=10.0, gt=0)
    """Longest time that one file may take, waiting for its turn included."""

    @pydantic.field_validator("hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            _places(host)
        return hosts

    @property
    def places(self) -> frozenset[tuple[str, int]]:
        """Hosts in lower case with the ports that are allowed there."""
        return frozenset(place for host in self.hosts for place in _places(host))


def _places(entry: str) -> set[tuple[str, int]]:
    """Read `NAME`, `NAME:PORT`, `ADDRESS` or `[ADDRESS]:PORT`.

    Raises:
        ValueError: it is none of them.
    """
    try:
        url = URL(f"http://[{entry}]" if entry.count(":") > 1 and "[" not in entry else f"http://{entry}")
        host = (url.host or "").lower()
    except ValueError:
        host = ""
    if not host or url != URL.build(scheme="http", host=host, port=url.port):
        raise ValueError(f"{entry!r} is no host; expected NAME or NAME:PORT, such as images.example.com")
    return {(host, url.explicit_port)} if url.explicit_port else {(host, 80), (host, 443)}


class MediaConfig(Config):
    """Images, audio and video in chat messages."""

    items_max: int = pydantic.Field(default=16, ge=0)
    """Most items of one request; models may take fewer."""
    request_bytes_max: int = pydantic.Field(default=64 << 20, ge=1024)
    """Most bytes of all items of one request, times its choices `n`."""
    bytes_max: int = pydantic.Field(default=256 << 20, ge=1024)
    """Bytes of media of all requests in flight in one process; beyond this a request gets 503."""
    fetch: MediaFetchConfig = MediaFetchConfig()
    """Media that requests name by URL."""


class ServerTlsConfig(Config):
    """Certificate of the port; the frontends read renewed files within 2 s."""

    certificate: str
    """PEM file with the certificate, and those between it and its authority."""
    key: str
    """PEM file with its private key, not encrypted."""


class StreamConfig(Config):
    """Keep-alive of silent streams: proxies close idle connections, many after 60 s."""

    headers_after_s: float = pydantic.Field(default=5.0, gt=0)
    """How long the response headers wait for the first token; an error after that is an event of the stream, not an HTTP status."""
    heartbeat_s: float = pydantic.Field(default=15.0, gt=0)
    """How long a stream may be silent before it sends a comment, which clients ignore."""


class PageConfig(Config):
    """The live page at `/`, which shows workers, requests and decisions to people."""

    enabled: bool = True
    """Whether there is a page, and the `/watch` routes that it asks."""
    asks_token: bool | None = None
    """Whether it asks for the admin token; None: where the API asks for keys, or other machines reach the port."""
    kills_workers: bool = False
    """Whether it has a button that kills a worker, to see its requests go on elsewhere; for demonstrations, as `--demo` is."""


class BatchesConfig(Config):
    """Files and batches (`/v1/files`, `/v1/batches`)."""

    directory: str | None = None
    """Where they are kept, shared by all frontends of the deployment and by no other one; None: no files and batches."""
    at_once: int = pydantic.Field(default=16, ge=1)
    """Requests of batches that run at once in one process while it has no other requests; else one runs."""
    requests_max: int = pydantic.Field(default=50_000, ge=1)
    """Requests of one batch."""
    file_bytes_max: int = pydantic.Field(default=200 << 20, ge=1024)
    """Largest file that is uploaded, and largest output of a batch."""
    tenant_bytes_max: int = pydantic.Field(default=4 << 30, ge=1024)
    """Bytes of a tenant's files; with more it uploads none."""
    files_kept_s: float = pydantic.Field(default=30 * 86_400.0, gt=0)
    """How long a file and an ended batch are kept."""


class FrontendConfig(Config):
    host: ListenHost = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    hosts: tuple[str, ...] = ()
    """Names by which the server may be asked on a loopback address, beside `localhost` and IP addresses: those that a proxy of this host passes on, such as `chat.example.com`. Any other in `Host`, and a page of another site that is not in `cors_origins`, gets 403 on every route. `*` is any. Elsewhere names are checked only where some are given."""
    port: int = pydantic.Field(default=8000, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    api_key_file: str | None = None
    """YAML file of tenants with hashes of their API keys and their limits (docs/tenants.md), read again when it changes; with it, or with PENSTOCK_API_KEY set, requests need a key."""
    tls: ServerTlsConfig | None = None
    """Certificate, with which the port speaks HTTPS and nothing else; None: HTTP."""
    access_log: str | None = pydantic.Field(default=None, min_length=1)
    """File that gets one line for each request, as JSON where PENSTOCK_LOG_FORMAT=json; `-` is stderr; None: no lines."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API from a browser, such as `https://chat.example.com`; `*` is any. Empty: none. `/admin` never allows any."""
    body_bytes_max: int = pydantic.Field(default=8 << 20, ge=1024)
    """Largest request body, after decompression; a larger one gets 413."""
    receive: FrontendReceiveConfig = FrontendReceiveConfig()
    """Limits while requests are received."""
    inflight_max: int = pydantic.Field(default=8192, ge=1)
    """Requests in flight in one process; the next one gets 503 with Retry-After, whatever its tenant. Set it above what the workers run plus `router.queue.requests_max`, so that the queue's per-tenant limit refuses first."""
    session_header: str = pydantic.Field(default="X-Session-Id", pattern=r"^[A-Za-z0-9-]+$")
    """Header in which a client names its session, for the routing policy `session`."""
    tenant_header: str = pydantic.Field(default="X-Tenant-Id", pattern=r"^[A-Za-z0-9-]+$")
    """Header in which a trusted client names the tenant that a request counts for (docs/tenants.md)."""
    priority_header: str = pydantic.Field(default="X-Priority", pattern=r"^[A-Za-z0-9-]+$")
    """Header that asks for a priority, `high`, `normal` or `low`, up to the tenant's."""
    trust_headers: bool = False
    """Where no API keys are set: whether any client may name a tenant and any priority in these headers. Set it behind a gateway that lets none of them through from outside."""
    explains: bool = False
    """Whether a client may send `X-Penstock-Explain: 1` to get the routing decision with its answer; the decision names workers and shows their load."""
    choices_max: int = pydantic.Field(default=128, ge=1)
    """Most choices of one request, which has prompts x n of them."""
    request_timeout_s: float = pydantic.Field(default=600.0, gt=0)
    """Longest time from the end of a request's body to its last token; a slower request ends with 504."""
    reader_timeout_s: float = pydantic.Field(default=120.0, gt=0)
    """Longest time in which a client reads no byte of a stream that has bytes for it; then its connection is closed."""
    keepalive_timeout_s: float = pydantic.Field(default=75.0, gt=0)
    """How long an idle connection stays open."""
    drain_timeout_s: float = pydantic.Field(default=30.0, ge=0)
    """On shutdown, how long requests in flight may still run."""
    responses_bytes_max: int = pydantic.Field(default=64 << 20, ge=0)
    """Bytes of conversations that `/v1/responses` keeps for `previous_response_id`, in one process; past it the tenant with the most bytes loses its oldest ones."""
    batches: BatchesConfig = BatchesConfig()
    """Files and batches."""
    media: MediaConfig = MediaConfig()
    """Images, audio and video in chat messages."""
    page: PageConfig = PageConfig()
    """The live page at `/`."""
    stream: StreamConfig = StreamConfig()
    """Keep-alive of silent streams."""
    write_buffer_bytes: int = pydantic.Field(default=64 << 10, ge=4096)
    """Bytes buffered for a slow client before its stream waits; the kernel buffers as many again."""

    @pydantic.model_validator(mode="after")
    def _check_bodies(self) -> Self:
        check_bodies(self.body_bytes_max, self.receive)
        return self


def check_bodies(body_bytes_max: int, receive: ReceiveConfig) -> None:
    """Raises: ValueError: the largest body does not fit receive.bytes_max."""
    if body_bytes_max > receive.bytes_max:
        raise wrong(
            f"body_bytes_max: must be <= receive.bytes_max, got {body_bytes_max} > {receive.bytes_max}"
        )


class EndpointPickerConfig(Config):
    """Where Envoy asks for endpoints, over gRPC."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    port: int = pydantic.Field(default=9002, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    tls: ServerTlsConfig | None = None
    """Certificate of the port, read again when it changes; None: no TLS."""
    body_timeout_s: float = pydantic.Field(default=60.0, gt=0)
    """A request whose body is not complete after so long is refused with 408."""
