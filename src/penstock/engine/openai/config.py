"""Settings of running servers and of other regions: URLs, API, limits, certificates and health checks."""

import re
import ssl
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import pydantic

from penstock.core.config import Config, wrong
from penstock.core.errors import ConfigError

_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_KEY_BYTES_MAX = 16_384
ApiName = Literal["auto", "vllm", "trtllm", "sglang", "llamacpp", "ollama", "penstock", "text"]


class LimitsConfig(Config):
    """Bounds on one request to the server."""

    connect_timeout_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest seconds until a connection is made."""
    silence_s: float = pydantic.Field(default=120.0, gt=0)
    """Longest seconds without a token of an answer, the wait for its first one included; then the request goes to another worker."""
    line_bytes_max: int = pydantic.Field(default=1 << 20, ge=1024)
    """Longest line of a streamed answer; a longer one ends the request."""
    answer_bytes_max: int = pydantic.Field(default=16 << 20, ge=4096)
    """Longest answer that is not streamed: model lists, metrics, errors, and prefills for another worker."""


class HealthConfig(Config):
    """When a failing server stops getting requests, and when it gets requests again."""

    interval_s: float = pydantic.Field(default=2.0, gt=0)
    """Seconds between two health checks, each of which asks for `/health` and `/v1/models`."""
    timeout_s: float = pydantic.Field(default=5.0, gt=0)
    """Longest seconds of a health check, and of the trial request that lets a server back in."""
    failures_max: int = pydantic.Field(default=3, ge=1)
    """Failed checks in a row, or failed requests in a row, after which the server gets no more. A refused connection or another model is enough at once."""
    retry_s_max: float = pydantic.Field(default=10.0, gt=0)
    """Longest seconds between two trials of a server that failed; they begin at `interval_s` and double."""


class ServerConfig(Config):
    """The `args` of engine `openai`."""

    url: tuple[str, ...] = pydantic.Field(min_length=1)
    """Where the servers answer, such as http://10.0.0.1:8000; one worker for each."""
    model: str | None = pydantic.Field(default=None, min_length=1)
    """The model's name at the servers; None: the one in `/v1/models` that has the name or path of the graph's model."""
    api: ApiName = "auto"
    """The servers' API; `auto` asks them."""
    api_key_file: str | None = pydantic.Field(default=None, min_length=1)
    """File whose first line is sent to the servers as a bearer token."""
    limits: LimitsConfig = LimitsConfig()
    """Bounds on one request."""
    health: HealthConfig = HealthConfig()
    """When a server gets no requests."""
    load_interval_s: float = pydantic.Field(default=0.5, gt=0)
    """Seconds between two readings of `/metrics`, or of `/load` of another deployment, which tell of requests of other clients."""
    kv_events: tuple[str, ...] = ()
    """Where each server publishes its KV events, such as tcp://10.0.0.1:5557: one for each URL, or none."""
    kv_events_replay: tuple[str, ...] = ()
    """Where each server sends KV events again: one for each URL, or none."""
    bootstrap_port: int = pydantic.Field(default=8998, ge=1, le=65535)
    """Port at which a prefill server of SGLang is found by decode servers (`--disaggregation-bootstrap-port`)."""
    bootstrap_host: str | None = pydantic.Field(default=None, min_length=1)
    """Host for the same; None: that of the URL."""

    @pydantic.field_validator("url", "kv_events", "kv_events_replay", mode="before")
    @classmethod
    def _read_urls(cls, urls: Any) -> Any:
        return (urls,) if isinstance(urls, str) else urls

    @pydantic.field_validator("url")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        checked = tuple(base_url(url) for url in urls)
        for url in checked:
            if checked.count(url) > 1:
                raise wrong(f"{url} is named twice; each server needs one worker")
        return checked

    @pydantic.model_validator(mode="before")
    @classmethod
    def _need_urls(cls, given: Any) -> Any:
        if isinstance(given, dict) and "url" not in given:
            raise wrong("url: missing; name the running servers, as in --url http://host:8000")
        return given

    @pydantic.model_validator(mode="after")
    def _check_counts(self) -> Self:
        for name, endpoints in (("kv_events", self.kv_events), ("kv_events_replay", self.kv_events_replay)):
            if endpoints and len(endpoints) != len(self.url):
                raise wrong(f"{name}: must have one for each url, {len(self.url)}, got {len(endpoints)}")
        if self.kv_events_replay and not self.kv_events:
            raise wrong("kv_events_replay: needs kv_events, where the events themselves come from")
        return self

    def of_server(self, index: int) -> Self:
        """Give the settings of one worker, which has the server at this place of `url`.

        Raises:
            ConfigError: there are fewer servers.
        """
        if index >= len(self.url):
            raise ConfigError(
                f"engine openai: worker {index + 1} has no server, as url names {len(self.url)}; name one for each worker"
            )
        given = ("url", "kv_events", "kv_events_replay")
        own = {name: values[index : index + 1] for name in given if (values := getattr(self, name))}
        return self.model_copy(update=own)

    def api_key(self) -> str | None:
        """Read the key.

        Raises:
            ConfigError: the file cannot be read, or its first line is empty.
        """
        if self.api_key_file is None:
            return None
        try:
            with Path(self.api_key_file).expanduser().open("rb") as file:
                lines = file.read(_KEY_BYTES_MAX).decode("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"engine openai: api_key_file: {self.api_key_file}: {error}") from error
        if not lines or not lines[0].strip():
            raise ConfigError(
                f"engine openai: api_key_file: {self.api_key_file}: the first line is empty; expected a key"
            )
        if not lines[0].strip().isprintable():
            raise ConfigError(
                f"engine openai: api_key_file: {self.api_key_file}: the first line has control characters; expected a key"
            )
        return lines[0].strip()


def base_url(url: str) -> str:
    """Normalize a server's URL: no slash at its end, and no `/v1`."""
    if not _URL.fullmatch(url):
        raise wrong(f"must be like http://host:8000, got {url!r}")
    try:
        urlsplit(url).port  # noqa: B018 - raises where it is none
    except ValueError as error:
        raise wrong(f"must be like http://host:8000, got {url!r} ({error})") from None
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


class RegionTlsConfig(Config):
    """Certificates for the frontends of another region."""

    authority: str | None = pydantic.Field(default=None, min_length=1)
    """File with the certificates of the authorities that signed those of the frontends; null: those of the system."""
    certificate: str | None = pydantic.Field(default=None, min_length=1)
    """File with this deployment's own certificate, where a proxy in front of the other region asks for one."""
    key: str | None = pydantic.Field(default=None, min_length=1)
    """File with the private key of `certificate`."""

    @pydantic.model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.certificate is None) is not (self.key is None):
            given, lacks = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise wrong(f"{given} is set without {lacks}; set both, or leave both out")
        return self

    def context(self, place: str) -> ssl.SSLContext:
        """Read the files.

        Raises:
            ConfigError: one cannot be read, or certificate and key do not belong together.
        """
        try:
            authority = None if self.authority is None else str(Path(self.authority).expanduser())
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise ConfigError(f"{place}.authority: {self.authority}: {_reason(error)}") from error
        if self.certificate is not None and self.key is not None:
            try:
                context.load_cert_chain(Path(self.certificate).expanduser(), Path(self.key).expanduser())
            except OSError as error:
                raise ConfigError(
                    f"{place}: {self.certificate} and {self.key}: {_reason(error)}; expected a certificate and its key"
                ) from error
        return context


class RegionLimits(LimitsConfig):
    """Bounds on one request to another region."""

    silence_s: float = pydantic.Field(default=60.0, gt=0)
    """Longest seconds without a token of an answer, the wait for its first one included; then the request goes to another worker."""


class RegionHealth(HealthConfig):
    """When another region stops getting requests, and when it gets requests again."""

    interval_s: float = pydantic.Field(default=1.0, gt=0)
    """Seconds between two checks of the region, and of each of its frontends where there are several."""
    timeout_s: float = pydantic.Field(default=3.0, gt=0)
    """Longest seconds of a check, and of the trial request that lets the region back in."""
    failures_max: int = pydantic.Field(default=2, ge=1)
    """Failed checks in a row, or failed requests in a row, after which the region, or one of its frontends, gets no more."""


class RegionConfig(Config):
    """How the frontends of another region are reached."""

    name: str
    """The other region, by the name that it has in its own `router.location.region`."""
    urls: tuple[str, ...] = pydantic.Field(min_length=1, max_length=64)
    """Its frontends, such as https://10.0.1.1:8000: requests go to the one with the fewest of them; one that fails gets none until it answers again."""
    model: str | None = pydantic.Field(default=None, min_length=1)
    """The model's name there; null: the one that has the name or path of this graph's model."""
    api_key_file: str | None = pydantic.Field(default=None, min_length=1)
    """File whose first line is the API key that the other region knows this one by; null: it asks for none."""
    tls: RegionTlsConfig | None = None
    """Certificates, where the URLs are https; null: the system's authorities."""
    limits: RegionLimits = RegionLimits()
    """Bounds on one request to it."""
    health: RegionHealth = RegionHealth()
    """When it gets no requests."""
    load_interval_s: float = pydantic.Field(default=0.5, gt=0)
    """Seconds between two readings of its load."""

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise wrong(f"must be up to 40 small letters, digits or '-', the ends no '-', got {name!r}")
        return name

    @pydantic.field_validator("urls", mode="before")
    @classmethod
    def _read_urls(cls, urls: object) -> object:
        return (urls,) if isinstance(urls, str) else urls

    @pydantic.field_validator("urls")
    @classmethod
    def _check_urls(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        checked = tuple(base_url(url) for url in urls)
        for url in checked:
            if checked.count(url) > 1:
                raise wrong(f"{url} is named twice; name each frontend once")
        return checked

    @pydantic.model_validator(mode="after")
    def _check_tls(self) -> Self:
        plain = [url for url in self.urls if not url.startswith("https:")]
        if self.tls is not None and plain:
            raise wrong(f"tls has no effect on {plain[0]}; name the frontends by https://, or leave tls out")
        return self

    def server(self) -> ServerConfig:
        """Give the same as settings of a server."""
        return ServerConfig(
            url=self.urls[:1],
            model=self.model,
            api="penstock",
            api_key_file=self.api_key_file,
            limits=self.limits,
            health=self.health,
            load_interval_s=self.load_interval_s,
        )


class LinkConfig(RegionConfig):
    """The `engine_args` of a link: the other region, and the name of this one."""

    here: str
    """This deployment's region."""


def _reason(error: OSError) -> str:
    """Say why a file cannot be used; OpenSSL's own errors have no text of the system."""
    if isinstance(error, ssl.SSLError):
        return (
            "no certificates that can be read"
            if error.reason is None
            else error.reason.lower().replace("_", " ")
        )
    return (error.strerror or str(error)).lower()
