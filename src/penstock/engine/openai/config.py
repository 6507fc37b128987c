"""Settings of running servers: URL, API, limits and health checks."""

import re
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
    """When a failing server gets no more requests, and when it gets them again."""

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
